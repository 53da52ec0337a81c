import sys, json, torch, os
torch.set_num_threads(1)
from fsd_infer import FuzzyDecoder
name, prompts, raw, n, tok = sys.argv[1], sys.argv[2], sys.argv[3]=="raw", int(sys.argv[4]), int(sys.argv[5])
d=FuzzyDecoder.from_pretrained(name,"lookup+recycle",dtype="bf16")
rows=[json.loads(l) for l in open(prompts)][:n]
tot={}; cnt=0; H=0;ll=0
for r in rows:
    p=r.get("prompt") or r.get("question")
    ids=d.encode(p,chat=not raw)
    g=d.generate([ids],"exact",max_new_tokens=tok,do_sample=False)
    seq=g.sequences[0]
    with torch.no_grad(): lg=d.target.model(torch.tensor([ids+seq])).logits[0,len(ids)-1:-1].float()
    mx=lg.max(-1,keepdim=True).values; reg=mx-lg
    for T in (0.2,0.3,0.5,0.8,1.0):
        p=(lg/T).softmax(-1); tot[T]=tot.get(T,0)+(p*reg).sum().item()
    lp=lg.log_softmax(-1); ll+=lp.max(-1).values.sum().item(); H+=-(lp.exp()*lp).sum().item(); cnt+=len(seq)
print(name, prompts.split('/')[-1], "ll",round(ll/cnt,3),"H",round(H/cnt,3),{T:round(v/cnt,4) for T,v in tot.items()})
