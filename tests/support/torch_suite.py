"""torch's own tests of DDP, on the CPU, with legato attached to every DDP that they make.

    PYTHONPATH=tests python -m support.torch_suite [--modes stock,flat] [--ranks 2] [--tests a,b] [--json out.json]

torch's wheel contains its tests of distributed training. Most of those that make a `DistributedDataParallel` ask for
GPUs, though little in them needs one; `_OnCpu` turns their source into one for the CPU. In the mode `stock` they run
like that. In every other mode legato is attached to each DDP right after its construction, and gets each optimizer that
holds parameters of such a DDP:

- `flat`: a plan without forward overlap, two tensors a message;
- `overlapped`: a plan with forward overlap that cuts tensors in two; all messages are late, so that updates still wait
  for them when the next forward pass begins;
- `auto`: `plan="auto"`;
- `hasty`: the same, with fewer steps before legato plans.

The command prints each test that ends otherwise than under stock DDP, and why; for each mode, how many pass of those
that pass there, and in how many legato has sent messages.
"""

import argparse
import ast
import functools
import json
import os
import re
import sys
import time
import traceback
import types
import unittest
import weakref
from itertools import pairwise
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support import PATIENCE_S
from support.ranks import Ranks

#: Tests that are fast, each about something else.
SAMPLE = (
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_create_graph",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_ignore_params_arg",
    "test_ddp_join_model_equivalence",
    "test_ddp_logging_data_cpu",
    "test_output_unused_in_loss_dict_module",
    "test_post_localSGD_optimizer_parity",
    "test_stateless_api_with_ddp",
    "test_static_graph_multi_forward",
)
#: Tests that no DDP on the CPU can pass.
UNFIT = {
    "test_ddp_logging_data_gpu": "expects device_ids in DDP's log, and a model on the CPU has none",
    "test_ddp_profiling_execution_trace": "needs NCCL",
    "test_ddp_device": "expects inputs to be moved to a device with an index",
    "test_ddp_has_finalized": "waits for an all-reduce that never comes, until NCCL's watchdog ends it",
}
#: The test with which torch itself goes wrong if models are saved and loaded amid training: with a static graph, the
#: loaded DDP averages nothing.
UNSAVED = "test_DistributedDataParallel"
#: How late every message is in the mode `overlapped`.
LATE_S = 0.003
#: How long the other ranks may take to end too when one has failed.
GRACE_S = 3
#: Tests after which ranks are replaced.
TESTS = 25

_PATH = Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"
_MODULE = "torch.testing._internal.distributed.distributed_test"

# ---- torch's tests on the CPU ------------------------------------------------------------


def names():
    """All tests that make a DDP, themselves or in a method that they call."""
    source = _PATH.read_text()
    base = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and n.name == "_DistTestBase")
    lines = source.splitlines()
    texts = {m.name: "\n".join(lines[m.lineno : m.end_lineno]) for m in base.body if isinstance(m, ast.FunctionDef)}

    def makes_ddp(name):
        called = set(re.findall(r"self\.(\w+)\(", texts[name])) & texts.keys() - {name}
        return "DistributedDataParallel(" in texts[name] or any(map(makes_ddp, called))

    return [name for name in texts if name.startswith("test_") and makes_ddp(name)]


class _OnCpu(ast.NodeTransformer):
    """Lets no test be skipped, and everything be on the CPU."""

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        if node.name.startswith("test_"):  # the other decorators skip the test
            node.decorator_list = [d for d in node.decorator_list if "with_dist_debug_levels" in ast.unparse(d)]
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg in ("device", "device_ids", "output_device"):
                keyword.value = ast.Constant("cpu" if keyword.arg == "device" else None)
        match node.func:
            case ast.Attribute(attr="cuda"):
                node.func.attr, node.args = "cpu", []
            case ast.Attribute(attr="to") if node.args:
                node.args = [ast.Constant("cpu")]
        return node


@functools.cache
def _cases():
    """torch's tests, as a class of test cases."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"PYTORCH_PRINT_REPRO_ON_FAILURE": "0", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    del sys.argv[1:]  # torch reads them
    _stand_in()
    text = _PATH.read_text().replace("torch.cuda.manual_seed", "torch.manual_seed")
    text = text.replace("torch.cuda", "torch.cpu").replace('"cuda"', '"cpu"')
    text = text.replace("dim = 1000\n", "dim = 30\n")  # convolutions that take a GPU
    module = sys.modules[_MODULE] = types.ModuleType(_MODULE)
    tree = ast.fix_missing_locations(_OnCpu().visit(ast.parse(text)))
    exec(compile(tree, _PATH, "exec"), vars(module))
    module.init_multigpu_helper = lambda world_size, _: {rank: [rank] for rank in range(world_size)}
    from torch.testing._internal.common_utils import TestCase  # reads the environment

    class Cases(module.DistributedTest._DistTestBase, TestCase):
        rank = property(lambda _: dist.get_rank())
        world_size = property(lambda _: os.environ["WORLD_SIZE"])  # text in torch's class too

        def setUp(self):
            super().setUp()  # with file://, models are saved and loaded amid training
            module.INIT_METHOD = "env://" if self._testMethodName == UNSAVED else "file://"

        def _barrier(self, **_):
            dist.barrier()

    return Cases


def _stand_in():
    """Let torch itself take the CPU where it insists on an accelerator."""

    class Event:
        def record(self, stream=None):
            pass

        wait = record

    torch.Event = Event
    torch.accelerator.current_stream = lambda: types.SimpleNamespace(wait_stream=lambda stream: None)
    torch.nn.SyncBatchNorm.forward = _synchronized
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda ddp, module: None


def _synchronized(norm, x):
    """The forward pass of `nn.SyncBatchNorm`, which torch has for accelerators only."""
    if not norm.training:
        return torch.nn.modules.batchnorm._BatchNorm.forward(norm, x)
    shape, others = [1, -1] + [1] * (x.dim() - 2), [d for d in range(x.dim()) if d != 1]
    exact = x.double()
    own = torch.cat([exact.sum(others), exact.square().sum(others), exact.new_tensor([x.numel() / x.size(1)])])
    sums, squares, count = sum(dist.nn.functional.all_gather(own)).split([x.size(1), x.size(1), 1])
    mean = sums / count
    variance = squares / count - mean.square()
    if norm.track_running_stats:
        norm.num_batches_tracked += 1
        for running, new in (norm.running_mean, mean), (norm.running_var, variance * count / (count - 1)):
            running.lerp_(new.detach().to(running.dtype), norm.momentum)
    y = (exact - mean.view(shape)) * (variance + norm.eps).rsqrt().view(shape)
    return (y * norm.weight.view(shape) + norm.bias.view(shape) if norm.affine else y).to(x.dtype)


# ---- with legato -------------------------------------------------------------------------


def plan_for(ddp, mode):
    """The plan of a mode."""
    if mode in ("auto", "hasty"):
        return "auto"
    from legato.auto import default_buckets
    from legato.core.plan import Message, Plan, Slice

    pieces = [piece for message in default_buckets(ddp).messages for piece in message.slices]
    if mode == "overlapped":
        sizes = {name: p.element_size() for name, p in ddp.module.named_parameters()}
        ends = [(p, (0, p.stop // 2 // sizes[p.tensor] * sizes[p.tensor], p.stop)) for p in pieces]
        pieces = [Slice(p.tensor, a, b) for p, cuts in ends for a, b in pairwise(cuts) if a < b]
    size = 2 if mode == "flat" else 3
    messages = tuple(Message(tuple(pieces[at : at + size])) for at in range(0, len(pieces), size))
    return Plan(mode, messages, forward_overlap=mode == "overlapped")


def _attach_to_all(mode):
    """From now on, hand every DDP and every optimizer of its parameters to legato as soon as both exist."""
    import legato

    ddps, optimizers = [], []  # lists, so that all ranks take them in the same order

    def distribute(ddp, optimizer):
        assert legato.distribute(ddp, optimizer, plan_for(ddp, mode)) == (ddp, optimizer)

    def take_ddp(ddp):
        distribute(ddp, None)
        ddps.append(weakref.ref(ddp))
        join([ddp], [ref() for ref in optimizers])

    def take_optimizer(optimizer):
        optimizers.append(weakref.ref(optimizer))
        join([ref() for ref in ddps], [optimizer])

    def join(some_ddps, some_optimizers):
        for optimizer in filter(None, some_optimizers):
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for ddp in (d for d in some_ddps if d is not None):
                if any(id(p) in stepped for p in ddp.parameters()):
                    distribute(ddp, optimizer)

    def after(kind, name, take):
        method = getattr(kind, name)

        @functools.wraps(method)
        def method_and_more(this, *args, **kwargs):
            method(this, *args, **kwargs)
            if type(this) is kind:
                take(this)

        setattr(kind, name, method_and_more)

    after(DistributedDataParallel, "__init__", take_ddp)
    after(DistributedDataParallel, "__setstate__", take_ddp)  # makes one that was pickled
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            after(kind, "__init__", take_optimizer)


@functools.cache
def _prepare(mode, first_passes):
    """Turn this process to a mode, for good, and return the list in which legato's messages are noted."""
    sent = []
    if mode == "stock":
        return sent
    import legato.auto
    from legato.pytorch.network.channel import _GlooChannel
    from legato.pytorch.runtime.attached import attachment

    launch = _GlooChannel.__call__

    def late(channel, *launched):
        channel._last = channel._queue(lambda: (time.sleep(LATE_S), channel._carry_out(None, None, *launched)))
        return channel._last

    def noted(channel, buffer, message):
        sent.append(message)
        return (late if mode == "overlapped" else launch)(channel, buffer, message)

    _GlooChannel.__call__ = noted
    if mode == "hasty":
        legato.auto.WARMUP_STEPS, legato.auto.OBSERVED_STEPS = 1, 2
    elif mode != "auto":
        attachment.FIRST_PASSES = first_passes
    _attach_to_all(mode)
    return sent


# ---- running them ------------------------------------------------------------------------


def _result(outcome="pass", reason="", trace="", sent=0):
    return {"outcome": outcome, "reason": reason, "traceback": trace, "sent": sent}


def one_test(name, mode, first_passes, loud):
    """The result of a test on this rank."""
    if not loud:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
    cases, sent = _cases(), _prepare(mode, first_passes)
    before, environment = len(sent), dict(os.environ)
    try:
        cases(name).debug()
    except unittest.SkipTest as skipped:
        return _result("skip", str(skipped))
    except BaseException as error:
        where = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(_PATH)]
        lines = str(error).strip().splitlines() or ["no message"]
        said = " ... ".join(dict.fromkeys([lines[0], lines[-1]]))
        return _result("fail", f"{type(error).__name__}: {said} (lines {where} of torch's)", traceback.format_exc())
    finally:
        os.environ.clear()
        os.environ.update(environment)
        dist.set_debug_level_from_env()
    return _result(sent=len(sent) - before)


class _Suite(Ranks):
    """Ranks that run tests."""

    def result(self, timeout, *arguments):
        """The result of `one_test(*arguments)` on the first rank that does not pass; there are new ranks after it."""
        self.renew(TESTS)
        self.begin(one_test, *arguments)
        waiting, until, result = list(self._pipes), time.monotonic() + timeout, _result()
        while waiting:
            ready = connection.wait(waiting, max(0.0, until - time.monotonic()))
            if not ready:
                result = _result("hang", f"takes more than {timeout:g} s") if result["outcome"] == "pass" else result
                break
            for pipe in ready:
                waiting.remove(pipe)
                try:
                    ok, answer = pipe.recv()
                except (EOFError, OSError):
                    ok, answer = False, "the process has ended"
                if result["outcome"] == "pass":
                    result = answer if ok else _result("died", answer.splitlines()[0], answer)
            if result["outcome"] != "pass":
                until = min(until, time.monotonic() + GRACE_S)
        if result["outcome"] != "pass":
            self.close(force=True)
            self._start()
        return result


def run_all(mode, tests, ranks=2, timeout=PATIENCE_S, first_passes=0, loud=False, said=lambda *_: None):
    """{test: its result} in a mode; `said` hears of each."""
    suite, results = _Suite(ranks), {}
    try:
        for test in tests:
            began = time.monotonic()
            results[test] = suite.result(timeout, test, mode, first_passes, loud)
            results[test]["seconds"] = round(time.monotonic() - began, 2)
            said(test, results[test])
    finally:
        suite.close(force=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default="stock,flat,overlapped,auto", help="these, and hasty")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tests", help="names, separated by commas, or `sample`; default: all but the unfit")
    parser.add_argument("--timeout", type=float, default=PATIENCE_S, help="seconds for one test")
    parser.add_argument("--first-passes", type=int, default=0, help="passes that are DDP's, in flat and overlapped")
    parser.add_argument("--json", help="a file for all results, with tracebacks")
    parser.add_argument("--loud", action="store_true", help="show what the tests print")
    options = parser.parse_args()
    if options.tests is None:
        tests = [name for name in names() if name not in UNFIT]
    else:
        tests = list(SAMPLE) if options.tests == "sample" else options.tests.split(",")
    results = {}
    for mode in options.modes.split(","):
        began, stock = time.monotonic(), results.get("stock", {})  # without stock, every test has to pass

        def said(test, result, mode=mode, stock=stock):
            if result["outcome"] != stock.get(test, _result())["outcome"]:
                print(f"{mode:10} {test}: {result['outcome']}, {result['reason']}", flush=True)

        found = run_all(mode, tests, options.ranks, options.timeout, options.first_passes, options.loud, said)
        results[mode] = found
        good = [test for test in tests if results.get("stock", {}).get(test, _result())["outcome"] == "pass"]
        passed = [test for test in good if found[test]["outcome"] == "pass"]
        sent = sum(found[test]["sent"] > 0 for test in passed)
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{mode:10} {len(passed)} of {len(good)} pass; legato sends in {sent}; {took}", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
