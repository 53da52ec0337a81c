"""Launches of a recorded round, and the milliseconds that they should take on a GPU: reckoned, without one.

    python -m benchmarks.launches [--tree 6,10,60] [--rule exact] [--sampled] [--each] [--json FILE]

Target, head and round are the real ones, of tensors that have shapes and no values. Whatever would wait for the device
ends in an error. Every launch is priced by constants that a prototype's rounds on an H200 suggest: nothing here is
measured. `benchmarks.gpu_round` measures. A round is added to those that the record FILE has.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from benchmarks.gpu_place import DRAFTED
from benchmarks.recorded import ROOT
from benchmarks.workplace import shown_command
from fsd_bench.planned import planned_target
from fsd_bench.record import write_record
from fsd_core.errors import FsdError
from fsd_core.files import read_json
from fsd_core.tables import table
from fsd_infer.backends.choose import choose
from fsd_infer.drafters import Drafter, EagleDrafter, NoDrafter, TreeShape
from fsd_infer.drafters.eagle import EagleSession
from fsd_infer.engine.plan import RequestPlan
from fsd_infer.engine.recordable import RecordableRound
from fsd_infer.engine.request import Request
from fsd_infer.engine.state import DecodeState
from fsd_infer.environment import environment
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.rules.parsing import parse_rule
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import parse_tree

GOALS = {"": 5.2, "5,1,6": 7.0, "6,10,60": 8.0}  # ms of a round with Llama-3.1-8B's shape, by tree
BANDWIDTH = 4.28e12  # bytes per second of a copy
PRODUCT = 7.7e-6  # seconds of a product of few rows beyond its bytes: 129 of them took 4.5 ms in place of 3.51
LAUNCH = 2.2e-6  # seconds from one small launch of a graph to the next
SEVERAL = {"masked_fill": 2, "eye": 2, "topk": 3, "sort": 3, "scatter": 2, "index_put": 2}  # launches of an operation
ATTENTION, SELECTION = 3e-6, 0.35e-6  # more seconds of an attention, and of each number that a top-k finds
FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view", "scalar_tensor", "alias")
PROMPT, SLOTS = 600, 1024
_aten: Any = torch.ops.aten
_GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>) }
"""


class Launch(NamedTuple):
    """A launch, or the few of one operation.

    Attributes:
        part: of the round.
        name: of the operation or kernel.
        place: file and line.
        bytes: that it reads and writes.
        seconds: reckoned.
    """

    part: str
    name: str
    place: str
    bytes: int
    seconds: float


class Counting(TorchDispatchMode):
    """Notes what is launched while :attr:`part` is not None. What fills tensors is noted and not run."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.part: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if func.namespace == "aten" and func._can_decompose():  # inference mode hands composite operations on whole
            with self:
                return func.decompose(*args, **kwargs)
        if packet is _aten._to_copy and kwargs.get("device") is not None and args[0].device.type == "cpu":
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs["device"])
        filled = packet in (_aten.copy_, _aten.fill_, _aten.zero_) and args[0].device.type == "cuda"
        out = args[0] if filled else func(*args, **kwargs)
        name = packet.__name__
        if self.part is not None and func.namespace == "aten" and not func.is_view and name not in FREE:
            self._note(name, [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)])
        return out

    def _note(self, name: str, tensors: Sequence[Tensor]) -> None:
        sizes = [x.nbytes for x in tensors]
        reads_some = name in ("index_select", "embedding", "gather", "index", "index_copy_", "scatter_")
        size = 2 * (sizes[-2] if name == "index_copy_" else sizes[-1]) if reads_some else sum(sizes)
        product = name in ("mm", "bmm", "addmm")
        fixed = PRODUCT if product else LAUNCH * SEVERAL.get(name, 1)
        self._add(name, size, fixed + size / BANDWIDTH)

    def kernel(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Note a launch of Triton's."""
        if self.part is None:
            return
        name, arguments = function.__name__, dict(zip(function.arg_names, args, strict=False)) | options
        unread = ("K", "V") if name in ("_rotate", "_attend") else ()  # all slots
        size = sum(x.nbytes for key, x in arguments.items() if isinstance(x, Tensor) and key not in unread)
        seconds = LAUNCH
        if name == "_attend":
            keys = arguments["K"]
            size += 2 * keys.nbytes * PROMPT // keys.shape[2]
            seconds += ATTENTION
        elif name == "_read":
            seconds += SELECTION * arguments["COUNT"]
        self._add(f"{name}{tuple(grid)}", size, seconds + size / BANDWIDTH)

    def _add(self, name: str, size: int, seconds: float) -> None:
        frame: Any = sys._getframe()
        while frame is not None and f"{ROOT}/fsd_" not in frame.f_code.co_filename:
            frame = frame.f_back
        place = "" if frame is None else f"{frame.f_code.co_filename[len(str(ROOT)) + 1 :]}:{frame.f_lineno}"
        self.launches.append(Launch(self.part or "", name, place, size, seconds))

    def ends(self, part: str) -> None:
        """Give what was noted since the last part to this one."""
        self.launches = [launch if launch.part else launch._replace(part=part) for launch in self.launches]


@contextmanager
def shapes_alone(counting: Counting) -> Iterator[None]:
    """Let "cuda" be a device of tensors without values, of 132 multiprocessors, on which nothing runs."""
    from fsd_infer.backends.cuda import attention, fused, stack

    _set_guard()
    fused_weights: dict[int, Tensor] = {}

    def joined(parts: Sequence[nn.Linear]) -> tuple[Tensor, None]:
        rows, weight = sum(part.out_features for part in parts), parts[0].weight
        return fused_weights.setdefault(id(parts[0]), weight.new_empty(rows, weight.shape[1])), None

    patches = [
        patch.object(torch.cuda, "device_of", lambda x: nullcontext()),
        patch.object(attention, "_processors", lambda device: 132),
        patch.object(JITFunction, "run", lambda self, *args, **options: counting.kernel(self, *args, **options)),
        patch.object(FakeTensor, "tolist", lambda self: [*range(self.numel())]),  # of a head's draft ids
        *(patch.object(module, "can_fuse", lambda linears: True) for module in (fused, stack)),
        *(patch.object(module, "fused", joined) for module in (fused, stack)),
        patch("fsd_infer.engine.plan._recorder", lambda target, drafter: None),
    ]
    with ExitStack() as entered:
        for patcher in patches:
            entered.enter_context(patcher)
        for mode in (torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True), counting):
            entered.enter_context(mode)
        yield


def _set_guard() -> None:
    """Let a torch without CUDA index tensors of that device. One with CUDA does so by itself."""
    if torch.version.cuda is not None:
        return
    home = Path(torch.__file__).parent
    with TemporaryDirectory() as directory:
        source, library = Path(directory, "guard.cpp"), Path(directory, "guard.so")
        source.write_text(_GUARD)
        words = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{home}/include", source, "-o", library, f"-L{home}/lib"]
        subprocess.run([*words, "-lc10"], check=True)
        ctypes.CDLL(str(library))


def _filled(module: Any) -> Any:
    """Give a module of "meta" tensors others on "cuda", in bf16."""
    for part in module.modules():
        for name, x in part._parameters.items():
            if x is not None:
                weight = torch.empty(x.shape, dtype=torch.bfloat16, device="cuda")
                part._parameters[name] = nn.Parameter(weight, requires_grad=False)
        for name, x in part._buffers.items():
            part._buffers[name] = None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda")
    return module


def launches_of(
    shape: str, tree: TreeShape | None, rule: str = "exact", head: bool = True, greedy: bool = True
) -> list[Launch]:
    """Return the launches of a round.

    Args:
        shape: as :func:`.planned_target` takes it.
        tree: of an EAGLE-3 head; None: no drafts.
        rule: acceptance rule.
        head: whether that head has an LM head of its own; else the target's serves, and ids of the text join its ids.
        greedy: at temperature 0, else at 1.
    """
    planned, counting = planned_target(shape), Counting()
    last = int(planned.config.num_hidden_layers) - 1
    ids, layers = min(DRAFTED, planned.vocab_size // 2), sorted({min(2, last), last // 2, max(0, last - 2)})
    options = {"layout": "eagle3", "draft_vocab_size": ids, "fused_layers": layers, "own_lm_head": head}
    with torch.device("meta"):
        model: Any = EagleHead(EagleConfig.for_target(planned, **options))
    backend = choose("cuda")
    with shapes_alone(counting):
        target = Target(_filled(planned.model))
        vars(target)["lm_head_is_plain"] = True  # which would compare numbers
        drafter: Drafter = NoDrafter(target.vocab_size)
        if tree is not None:
            model = _filled(model)
            model.to = model.cast = lambda where: model
            drafter = EagleDrafter(model, target, tree)
        for owner in (target, *drafter.stack_owners()):
            owner.stack = backend.stack_for(owner)
        state = _state(target, drafter, rule, greedy)
        state.on_phase = counting.ends
        round = RecordableRound(state)
        inputs = [x.to("cuda") for x in round.inputs]
        for part in (None, ""):  # the first time, some things are made that stay
            counting.part = part
            round.whole(inputs)
        counting.ends("report")
    return counting.launches


def _state(target: Target, drafter: Drafter, rule: str, greedy: bool) -> DecodeState:
    """Return the state of one text as recorded rounds have it, which was read."""
    request = Request(prompts=[[1] * PROMPT], max_new_tokens=96, greedy=greedy)
    plan = RequestPlan(target, drafter, parse_rule(rule), request)
    plan.capacity = plan.drafter_slots = SLOTS
    state = plan.new_state()
    state.live = torch.ones(1, dtype=torch.bool, device="cuda")
    if isinstance(state.session, EagleSession):
        state.session._has_read_prompt = True
    return state


def report(launches: Sequence[Launch], goal: float | None, each: bool) -> str:
    """Return a table by part, and of every launch if asked."""
    lines = []
    for part in dict.fromkeys(launch.part for launch in launches):
        in_part = [launch for launch in launches if launch.part == part]
        products = [launch for launch in in_part if launch.name in ("mm", "bmm", "addmm")]
        lines.append([part, len(in_part), len(products), *_sums(in_part)])
    lines.append(["all", len(launches), "", *_sums(launches)])
    text = table(["part", "launches", "products", "GB", "ms, reckoned"], [[str(x) for x in line] for line in lines])
    text += "" if goal is None else f"\ngoal: {goal} ms"
    if each:
        counts = Counter((launch.part, launch.name, launch.place) for launch in launches)
        text += "\n\n" + table(
            ["part", "times", "launch", "place"], [[a, str(n), b, c] for (a, b, c), n in counts.items()]
        )
    return text


def _sums(launches: Sequence[Launch]) -> list[str]:
    size, seconds = sum(launch.bytes for launch in launches), sum(launch.seconds for launch in launches)
    return [f"{size / 1e9:.2f}", f"{1e3 * seconds:.2f}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shape", default="llama-3.1-8b", help="name of a shape, or a directory with a config.json")
    parser.add_argument("--tree", default="", help="shape of an EAGLE-3 head's trees (default: no drafts)")
    parser.add_argument("--rule", default="exact", help="acceptance rule")
    parser.add_argument("--sampled", action="store_true", help="at temperature 1 (default: 0)")
    parser.add_argument("--each", action="store_true", help="list every launch")
    parser.add_argument("--json", type=Path, help="record to which the round is added")
    args = parser.parse_args(argv)
    try:
        tree = parse_tree(args.tree) if args.tree else None
        if isinstance(tree, str):
            raise FsdError(f"--tree {tree}: give depth,width,nodes.")
        launches = launches_of(args.shape, tree, args.rule, greedy=not args.sampled)
    except FsdError as error:
        print(f"launches: {error}", file=sys.stderr)
        return 2
    is_goal = args.shape == "llama-3.1-8b" and not args.sampled
    print(report(launches, GOALS.get(args.tree) if is_goal else None, args.each))
    if args.json is not None:
        add_to_record(args.json, f"{args.tree or 'plain'}, {args.rule}, temperature {int(args.sampled)}", launches)
    return 0


def add_to_record(file: Path, name: str, launches: Sequence[Launch]) -> None:
    """Add a round to a record, by part."""
    parts = {}
    for part in dict.fromkeys(launch.part for launch in launches):
        in_part = [launch for launch in launches if launch.part == part]
        milliseconds = 1e3 * sum(launch.seconds for launch in in_part)
        parts[part] = {"launches": len(in_part), "ms_reckoned": round(milliseconds, 3)}
    total = {key: round(sum(part[key] for part in parts.values()), 3) for key in ("launches", "ms_reckoned")}
    record = read_json(file, "Delete it.") if file.exists() else {"rounds": {}}
    record["rounds"][name] = {**total, "parts": parts}
    write_record(file, {**record, "environment": environment(shown_command("benchmarks.launches", sys.argv[1:]))})


if __name__ == "__main__":
    sys.exit(main())
