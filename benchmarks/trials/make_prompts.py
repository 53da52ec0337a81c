"""IFEval-like training prompts: instructions from instructions.jsonl.gz with a checkable request appended."""
import gzip, json, random
rng = random.Random(5)
rows = [json.loads(l) for l in gzip.open('../shared/data/instructions.jsonl.gz','rt')]
rows = [r for r in rows if r['source'] in ('codealpaca','gpteacher-roleplay') and 40 < len(r['prompt']) < 300 and 'code' not in r['prompt'].lower() and 'function' not in r['prompt'].lower() and 'program' not in r['prompt'].lower()]
rng.shuffle(rows)
asks = [
 (" Do not use any commas in your answer.", "punctuation:no_comma", {}),
 (" Your entire response must be in lowercase letters.", "change_case:english_lowercase", {}),
 (" Answer in all capital letters.", "change_case:english_capital", {}),
 (" Wrap your whole response in double quotation marks.", "startend:quotation", {}),
 (" Give your answer a title in double angular brackets such as <<a title>>.", "detectable_format:title", {}),
 (" Use exactly 3 bullet points in markdown such as * a point.", "detectable_format:number_bullet_lists", {"num_bullets": 3}),
 (" Highlight at least 2 parts of your answer with markdown such as *highlighted*.", "detectable_format:number_highlighted_sections", {"num_highlights": 2}),
 (" Include at least 2 placeholders in square brackets such as [name].", "detectable_content:number_placeholders", {"num_placeholders": 2}),
 (" At the end add a postscript that starts with P.S.", "detectable_content:postscript", {"postscript_marker": "P.S."}),
 (" Use the words river and because in your answer.", "keywords:existence", {"keywords": ["river","because"]}),
 (" Do not use the words very and good.", "keywords:forbidden_words", {"forbidden_words": ["very","good"]}),
 (" Answer with less than 40 words.", "length_constraints:number_words", {"relation":"less than","num_words":40}),
]
out = []
for i, r in enumerate(rows[:160]):
    text, name, kw = asks[i % len(asks)]
    out.append({"key": i, "prompt": r['prompt'].strip() + text, "instruction_id_list":[name], "kwargs":[kw]})
with open('./train_ifeval.jsonl','w') as f:
    for r in out: f.write(json.dumps(r)+"\n")
print(len(rows), out[0], out[1])
