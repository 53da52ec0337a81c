"""Export a head in the format of vLLM, and serve its target with `fsd-infer serve`."""

import subprocess
import sys
import tempfile

import requests
from requests.adapters import HTTPAdapter, Retry

from fsd_infer import Target
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_train.cli import main as fsd_train

TARGET, PORT = "smollm2-135m", "8765"
target, out = Target.from_pretrained(TARGET), tempfile.mkdtemp()
head = EagleHead(EagleConfig.for_target(target, layout="eagle3", draft_vocab_size=4096))  # untrained; use your own
head.save_pretrained(f"{out}/head")
if fsd_train(["export", f"{out}/head", f"{out}/vllm", "--target", TARGET, "--to", "vllm"]) == 0:
    print(f'vllm serve MODEL --speculative-config \'{{"method": "eagle3", "model": "{out}/vllm"}}\'')
server = subprocess.Popen([sys.executable, "-m", "fsd_infer.cli.main", "serve", "--target", TARGET, "--port", PORT])
try:
    session = requests.Session()
    session.mount("http://", HTTPAdapter(max_retries=Retry(300, backoff_factor=1, backoff_max=1)))
    asked = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "rule": "tilted"}
    print(session.post(f"http://127.0.0.1:{PORT}/v1/completions", json=asked).json()["choices"][0]["text"])
finally:
    server.terminate()
