import sys,json,torch,random,os
torch.set_num_threads(1)
from fsd_infer import FuzzyDecoder
from fsd_infer.targets.target import Target
from fsd_infer.chat.encoding import read_prompts
from fsd_bench.runner import encode_row
from fsd_bench.score import read_references
name,prompts,dr,N,TOK,OUT=sys.argv[1],sys.argv[2],sys.argv[3],int(sys.argv[4]),int(sys.argv[5]),sys.argv[6]
dec=FuzzyDecoder.from_pretrained(name,"none",dtype="bf16"); t=dec.target
rows=list(read_prompts(prompts))[:N]; refs=read_references(rows,"auto")
enc=[encode_row(r,t.name,dec.tokenizer,t.max_positions) for r in rows]
def batched(ids,limit):
    order=sorted(range(len(ids)),key=lambda i:len(ids[i])); res=[None]*len(ids)
    for s in range(0,len(order),24):
        idx=order[s:s+24]; g=dec.generate([ids[i] for i in idx],"exact",max_new_tokens=limit,do_sample=False)
        for j,i in enumerate(idx): res[i]=(g.sequences[j],g.texts[j])
    return res
base=batched(enc,TOK)
sc=[r.score(b[1]) for r,b in zip(refs,base)]
print("base score",sum(sc)/len(sc),flush=True)
if dr.startswith("noise:"):
    s=float(dr[6:]); m=Target.from_pretrained(name,dtype=t.dtype); g=torch.Generator().manual_seed(1)
    for n,p in m.model.named_parameters():
        if p.dim()==2 and "embed" not in n and "lm_head" not in n:
            with torch.no_grad(): p.mul_((1+s*torch.randn(p.shape,generator=g)).to(p.dtype))
else: m=Target.from_pretrained(dr,dtype=t.dtype)
rng=random.Random(3); dev=[]
with torch.no_grad():
  for i,(seq,_) in enumerate(base):
    x=torch.tensor([enc[i]+seq]); k=len(enc[i])
    lt=t.model(x).logits[0,k-1:-1].float(); ld=m.model(x).logits[0,k-1:-1].float()
    c=ld.argmax(-1); y=torch.tensor(seq); mis=[j for j in range(len(seq)) if int(c[j])!=int(y[j]) and int(y[j])==int(lt[j].argmax())]
    rng.shuffle(mis)
    lp=lt.log_softmax(-1)
    for j in mis[:4]:
        dev.append(dict(i=i,j=j,c=int(c[j]),r=float(lp[j].max()-lp[j,c[j]]),lpy=float(lp[j].max())))
print(len(dev),"deviations",flush=True)
with torch.no_grad():
  for d in dev:
    ids=enc[d["i"]]+base[d["i"]][0][:d["j"]]+[d["c"]]; d["ids"]=ids
ans=batched([d["ids"] for d in dev],TOK)
for d,(seq,txt) in zip(dev,ans):
    full=base[d["i"]][0][:d["j"]]+[d["c"]]+seq
    d["new"]=refs[d["i"]].score(dec.tokenizer.decode(full,skip_special_tokens=True)); d["old"]=sc[d["i"]]
    x=torch.tensor([d["ids"]+seq])
    with torch.no_grad(): lp=t.model(x).logits[0,len(d["ids"])-1:-1].float().log_softmax(-1)
    d["next"]=float(lp[0].max()) if len(lp) else 0.0
    d["ll_after"]=float(lp.max(-1).values.sum()); d["n_after"]=len(seq)
    old=base[d["i"]][0][d["j"]:]
    x=torch.tensor([enc[d["i"]]+base[d["i"]][0]])
    d.pop("ids")
    open(OUT,"a").write(json.dumps(d)+"\n")
import statistics as st
def table(key,edges,D):
    for a,b in zip(edges,edges[1:]):
        S=[d for d in D if a<=d[key]<b]
        if S: print(f"{key} {a:.2f}-{b:.2f}: n {len(S)} d={sum(d['new']-d['old'] for d in S)/len(S):+.3f} right->wrong {sum(d['old']==1 and d['new']==0 for d in S)/max(1,sum(d['old']==1 for d in S)):.2f} (of {sum(d['old']==1 for d in S)}) wrong->right {sum(d['old']==0 and d['new']==1 for d in S)/max(1,sum(d['old']==0 for d in S)):.2f}")
E_=[0,.15,.35,.7,1.1,1.5,2.5,4,20]
table("r",E_,dev)
for lo,hi in ((0,.7),(.7,1.5),(1.5,4)):
    print("r in",lo,hi); table("next",[-9,-1.2,-.7,-.4,-.2,-.05,.1],[d for d in dev if lo<=d["r"]<hi])
