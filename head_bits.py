"""Trial: the head in blocks of 8 or 4 bits instead of fp8. python head_bits.py fp8|q8|q4 prints tau and CPU ms per round."""
import sys

form = sys.argv[1]
torch.set_num_threads(1)
import numpy as np
from fsd_infer import FuzzyDecoder
from fsd_infer.cpu import packing, blocks
from fsd_infer.cpu.blocks import Blocks,_records
def quantize(self):
    if self.native is None or self.kernels is None or self.scales is not None or self.kind: return
    w=self.dense().float().view(self.columns,-1,32)
    if form=="q8":
        s=(w.abs().amax(-1)/127).half().clamp_min(2**-14); codes=(w/s.float()[...,None]).round().clamp(-127,127)
        kind=8
    else:
        i=w.abs().argmax(-1,keepdim=True); m=w.gather(-1,i)[...,0]
        s=(m/-8).half(); s=torch.where(s==0,torch.tensor(6e-5).half(),s); codes=(w/s.float()[...,None]).round().clamp(-8,7); kind=2
    b=Blocks(kind,_records(codes.to(torch.int8).view(self.columns,-1),s,form!="q8"))
    if not packing.holds_blocks(kind,self.columns,self.depth): print("no",self.columns,self.depth); return
    self.kind=kind; self.weight=self._panels(b)
    self.native.panels=self.weight.data_ptr(); self.native.kind=kind
if form!="fp8": packing.Packed.quantize=quantize
d=FuzzyDecoder.from_pretrained("smollm2-135m",tree=__import__("fsd_infer").TreeShape(5,6,16))
import fsd_infer.drafters.eagle as E
acc=collections.defaultdict(float)
def wrap(o,n):
    f=getattr(o,n)
    def g(*a,**k):
        t=time.thread_time(); r=f(*a,**k); acc[n]+=time.thread_time()-t; return r
    setattr(o,n,g)
for c in (E.TreeSession,E.EagleSession):
    for n in ("draft","extend"):
        if n in vars(c): wrap(c,n)
rows=[json.loads(l) for l in open("data/spec_bench_dev.jsonl")][::6]
tok=fw=0
for r in rows:
    o=d.generate(r["turns"][0],max_new_tokens=48,do_sample=False)
    s=o.stats; tok+=len(o.sequences[0]); fw+=len(o.sequences[0])/s.tau
print(form,"tau",tok/fw,"draft ms/round",acc["draft"]/fw*1e3,"extend",acc["extend"]/fw*1e3)
