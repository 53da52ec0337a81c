"""research harness: settings on rungs in batches; lines appended."""
import sys, json, time, torch, argparse, os
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS","1")))
from fsd_infer import FuzzyDecoder, parse_rule
from fsd_infer.drafters import TreeShape
from fsd_infer.drafters.lm import LMDrafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.targets.target import Target
from fsd_infer.chat.encoding import read_prompts
from fsd_bench.runner import encode_row
from fsd_bench.score import read_references
from fsd_bench.likelihood import mean_log_likelihoods
ap=argparse.ArgumentParser()
ap.add_argument("--target",default="smollm2-135m"); ap.add_argument("--rungs",nargs="+"); ap.add_argument("--rules",nargs="+")
ap.add_argument("--prompts"); ap.add_argument("--limit",type=int,default=48); ap.add_argument("--tokens",type=int,default=96)
ap.add_argument("--batch",type=int,default=8); ap.add_argument("--depth",type=int,default=8); ap.add_argument("--out"); ap.add_argument("--raw",action="store_true")
ap.add_argument("--temperature",type=float,default=0.0)
a=ap.parse_args()
def rung(name, target, depth):
    if name.startswith("noise:"):
        s=float(name[6:]); m=Target.from_pretrained(a.target,dtype=target.dtype); g=torch.Generator().manual_seed(1)
        for n,p in m.model.named_parameters():
            if p.dim()==2 and "embed" not in n and "lm_head" not in n: 
                with torch.no_grad(): p.mul_((1+s*torch.randn(p.shape,generator=g)).to(p.dtype))
        return LMDrafter(m,target,depth,0.0)
    if name=="head": return load_drafter("shipped",target,TreeShape(depth,1,depth+1))
    return LMDrafter(Target.from_pretrained(name,dtype=target.dtype),target,depth,0.0)
dec=FuzzyDecoder.from_pretrained(a.target,"none",dtype="bf16")
t=dec.target
rows=list(read_prompts(a.prompts))[:a.limit]
refs=read_references(rows,"auto")
enc=[encode_row(r,t.name,dec.tokenizer,t.max_positions) for r in rows]
done=set()
if os.path.exists(a.out):
    for l in open(a.out):
        r=json.loads(l); done.add((r["rung"],r["rule"],r["depth"],r["temperature"],r["prompts"]))
gen=dict(do_sample=False,temperature=None,top_p=None,top_k=None) if a.temperature==0 else dict(do_sample=True,temperature=a.temperature,top_p=None,top_k=None)
for rn in a.rungs:
    d=None
    for rule in a.rules:
        key=(rn,rule,a.depth,a.temperature,len(rows))
        if key in done: continue
        if d is None:
            d=rung(rn,t,a.depth); dec.pack(d, release=True)
        t0=time.time(); answers=[]
        order=sorted(range(len(enc)),key=lambda i:len(enc[i]))
        res=[None]*len(enc)
        for s in range(0,len(order),a.batch):
            idx=order[s:s+a.batch]
            g=dec.generate([enc[i] for i in idx],rule,drafter=d,max_new_tokens=a.tokens,seed=3+s,**gen)
            for j,i in enumerate(idx):
                res[i]=(g.sequences[j],g.texts[j],g.stats.rows[j])
        ll=mean_log_likelihoods(t,[(enc[i],res[i][0]) for i in range(len(enc))])
        R=[]
        for i,(seq,txt,st) in enumerate(res):
            R.append(dict(n=len(seq),f=st.target_forwards,score=None if refs[i] is None else refs[i].score(txt),ll=ll[i],copied=st.copied_4grams,repeated=st.repeated_4grams,nats=st.divergence_spent,text=txt))
        line=dict(rung=rn,rule=rule,depth=a.depth,temperature=a.temperature,prompts=len(rows),seconds=time.time()-t0,rows=R)
        open(a.out,"a").write(json.dumps(line)+"\n")
        n=sum(r["n"] for r in R); f=sum(r["f"] for r in R)
        mean=lambda k:sum(r[k] or 0 for r in R)/len(R)
        print(f"{rn:12} {rule:26} tau {(n-len(R))/f:.2f} score {100*mean('score') if refs[0] is not None else float('nan'):.1f} ll {sum(r['ll']*r['n'] for r in R)/n:.3f} cop {mean('copied'):.3f} rep {mean('repeated'):.3f} nats/tok {sum(r['nats'] for r in R)/n:.4f} len {n/len(R):.0f} {time.time()-t0:.0f}s",flush=True)
