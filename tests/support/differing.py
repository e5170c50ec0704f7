"""Training programs made at random in which the ranks differ, under stock DDP and under legato.

    PYTHONPATH=tests python -m support.differing [--seeds 0:1000] [--one 17] [--habits a,b] [--auto] [--real] [--dry]

As in `support.programs`, whose habits these programs have, too. But some things are done on some of the ranks only, or
by each rank in its own way: `clipped@some`; or by the ranks of one model only: `clipped@part`. There are two to four
ranks; they may train several models, on parts of them or on groups that cross. With `--real`, programs are so long that
legato decides by real times, after tournaments of real length.

On more than two ranks bits depend on the order of additions. There, hooks round gradients such that averages are exact.
"""

import contextlib
import functools
import io
import random
import sys
import time
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from support import programs
from support.automatic import _calibrated_once, _planned_here
from support.programs import HABITS, ON_LEGATO, Deliberate, habit

#: Habits of some ranks, or of all ranks together, and those of `support.programs` on some ranks or on one part.
HABITS.update(alone={}, together={}, some={})
alone, together = functools.partial(habit, kind="alone"), functools.partial(habit, kind="together")

# ---- habits of some ranks --------------------------------------------------------------------


@alone
def own_rate(job, rng):
    """A learning rate of the rank's own."""
    factor = rng.uniform(0.5, 2)
    job.with_optimizers(rng)(lambda os: [g.update(lr=g["lr"] * factor) for o in os for g in o.param_groups])


@alone
def own_key(job, rng):
    """In groups of parameters, a key or a value of the rank's own."""
    key = rng.choice(["file", f"rank {dist.get_rank()}"])
    own = {key: rng.choice([f"/rank/{dist.get_rank()}", dist.get_rank(), None])}
    job.with_optimizers(rng)(lambda os: [g.update(own) for o in os for g in o.param_groups])


@alone
def own_precision(job, rng):
    """Products in another precision."""
    job.early_or_late(rng)(lambda: torch.set_float32_matmul_precision(rng.choice(["high", "medium"])))
    job.cleanups.append(lambda: torch.set_float32_matmul_precision("highest"))


class Around(nn.Module):
    """A module around another one, whose parameters have other names then."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.batch = inner, inner.batch

    def forward(self, x):
        return self.inner(x)


@alone
def around(job, rng):
    job.module = Around(job.module)


@alone
def own_batches(job, rng):
    """Smaller batches, or pauses before them."""
    batch, most, pause_s = job.batch, rng.randint(1, 4), rng.choice([0, 0.002, 0.02])

    def own():
        time.sleep(pause_s if rng.random() < 0.2 else 0)
        return tuple(part[:most] for part in batch())

    job.batch = own


@alone
def in_evaluation_mode(job, rng):
    """The model is trained in evaluation mode, from some step on, or for a while."""
    steps = job.some(rng)
    job.moments["begin"].append(lambda: job.module.train(job.i not in steps))


@alone
def mute(job, rng):
    """There is no standard error, or it is closed, from the start or later."""
    stream = rng.choice([None, io.StringIO()])
    if stream is not None:
        stream.close()
    job.early_or_late(rng)(lambda: setattr(sys, "stderr", stream))  # `run` puts it back


@alone
def caught(job, rng):
    """Something else raises, and the program goes on."""
    errors = []

    @job.at(rng)
    def fail():
        try:
            raise Deliberate
        except Deliberate as error:
            errors.append(error)


def _unsent(job, rng):
    with job.ddp.no_sync():
        job.backward(job.loss())


def _failing(job, rng):
    def fail(*_):
        raise Deliberate

    hook = rng.choice(job.leaves()).register_forward_pre_hook(fail)
    with contextlib.suppress(Deliberate):
        job.loss()
    hook.remove()


#: Passes through the wrapped model that send nothing; what comes out is dropped.
PASSES = {
    "forward": lambda job, rng: job.loss(),
    "forward_in_no_sync": lambda job, rng: job.ddp.no_sync()(job.loss)(),
    "unsent": _unsent, "failing": _failing,
}  # fmt: skip


@alone
def more_passes(job, rng):
    """Passes that the other ranks do not make: between two steps, or when these have ended."""
    kinds = rng.sample(list(PASSES), rng.randint(1, 2))
    run = lambda: PASSES[rng.choice(kinds)](job, rng)  # noqa: E731
    if rng.random() < 0.3:
        job.moments["end"].append(lambda: [run() for _ in range(rng.randint(1, 4))])
    else:
        job.at(rng, "begin", "after")(run)


# ---- habits of all ranks together ------------------------------------------------------------


@together
def in_parts(job, rng):
    """Each part of the ranks trains its own DDP, for as many steps as it likes."""
    ranks = rng.sample(range(dist.get_world_size()), dist.get_world_size())
    cut, more = rng.randint(1, len(ranks) - 1), rng.choice([0, 3, 8])
    _divide(job, [sorted(ranks[:cut]), sorted(ranks[cut:])])
    job.second_group = job.options["process_group"]
    job.steps += more * job.parts.index(job.part)


@together
def idle_part(job, rng):
    """A part of the ranks trains nothing."""
    in_parts(job, rng)
    if job.part is job.parts[1]:
        job.train = lambda: None


@together
def mesh(job, rng):
    """Two models, whose groups cross."""
    _divide(job, [[0, 1], [2, 3]])
    job.second_group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]
    programs.second_model_in_turns(job, rng)


def _divide(job, parts):
    groups = [dist.new_group(part) for part in parts]
    job.parts = parts
    job.options["process_group"] = groups[parts.index(job.part)]


@together
def group_made(job, rng):
    """A group is made at some time, by all ranks or by its members alone; they use it, and perhaps destroy it.

    A rank does that as its step begins, which happens whatever it does in steps. A group across models, which may be in
    other steps, is used at once.
    """
    local, world = rng.random() < 0.5, [*range(dist.get_world_size())]
    among = job.part if local else world
    members = sorted(rng.sample(among, rng.randint(1, len(among))))
    uses, destroyed, group = job.some(rng), rng.random() < 0.5, []
    first = min(uses)
    uses = uses if among == job.part else {first}

    @job.moments["begin"].append
    def make_or_use():
        if dist.get_rank() not in members and (local or job.i != first):
            return
        if job.i == first:
            group.append(dist.new_group(members, use_local_synchronization=local))
        if dist.get_rank() in members and job.i in uses:
            note = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(note, group=group[0])
            job.note("sum", note)
            if destroyed and job.i == max(uses):
                dist.destroy_process_group(group[0])


@together
def one_updates(job, rng):
    """The first rank of each model has the optimizer; after its steps it broadcasts the weights."""
    first = job.part[0]
    if dist.get_rank() != first:
        job.classes, job.optimizers_of, job.zero = [], lambda module: [], lambda: job.ddp.zero_grad()

    @job.moments["after"].append
    def broadcast():
        for p in job.module.parameters():
            dist.broadcast(p.data, first, group=job.options.get("process_group"))


@together
def real(job, rng):
    """So many steps that a tournament of real length ends."""
    job.steps = 700


# ---- habits of `support.programs` on some ranks ----------------------------------------------

#: Collectives of all ranks, in each of some steps.
COLLECTIVES = {"averaged_by_hand", "broadcast", "gradient_reduced", "all_reduced", "gathered", "own_collectives"}
#: What DDP needs on all ranks of a model: collectives, passes that send, parameters and options.
ON_ALL = {
    *COLLECTIVES, *ON_LEGATO.split(), "traced_by_legato", "module_given", "late_optimizer", "optimizers_last",
    "several_syncing_passes", "never_sent", "forward_in_no_sync", "around_ddp", "some_inputs", "forward_raises",
    "backward_raises", "closures", "joined", "static_graph", "find_unused_parameters", "skip_all_reduce_unused_params",
    "broadcast_buffers_off", "init_sync_off", "communication_hook", "frozen_part", "pruned", "tied_midway",
    "two_models_one_optimizer", "second_model_in_turns", "copied_midway", "wrapped_again", "copied_with_optimizers",
    "optimizer_copied_midway", "lone_forward", "moved_and_back", "reloaded", "two_optimizers", "overlapping_optimizers",
    "optimizer_of_each",
}  # fmt: skip


def on_some(job, rng, name):
    """A habit of some ranks, each in its own way."""
    ranks = [*range(dist.get_world_size())]
    if dist.get_rank() in rng.sample(ranks, rng.choice([1, 1, len(ranks)])):
        function = HABITS["alone"].get(name) or HABITS["other"][name]
        function(job, random.Random(f"{job.seed} {name} {dist.get_rank()}"))


def on_part(job, rng, name):
    """A habit of the ranks of one model, all in the same way."""
    if rng.randrange(2) == job.parts.index(job.part):
        HABITS["other"][name](job, rng)


#: What is drawn as often as habits that only some ranks have.
OFTEN = ["skipped_steps", "stepped_twice", "step_raises", "accumulated", "lost_forward"]
SOME = [*HABITS["alone"], *(name for name in HABITS["other"] if name not in ON_ALL)]
PART = [name for name in HABITS["other"] if name not in COLLECTIVES]
HABITS["some"] |= {f"{name}@some": functools.partial(on_some, name=name) for name in SOME}
HABITS["some"] |= {f"{name}@part": functools.partial(on_part, name=name) for name in PART}

# ---- drawing and running ---------------------------------------------------------------------

#: On more than two ranks, what adds in other dtypes than float32 and float64, or after the gradients are rounded.
INEXACT = {"sparse", "bfloat16", "mixed", "complex", "communication_hook", "accumulated_clamped"}
#: Forward passes of a rank's own: under DDP, each broadcasts buffers.
FORWARDS = {f"{name}@some" for name in (
    "evaluated", "evaluated_for_inference", "evaluated_with_gradients", "forward_without_gradients", "more_passes",
    "accumulated", "accumulated_by_flag", "lost_forward", "two_forwards_one_backward", "two_forwards_two_backwards",
)}  # fmt: skip
SECOND = {"mesh", "second_model_in_turns", "two_models_one_optimizer"}
#: What DDP cannot do on a part of the ranks, whose copies are on all.
ON_A_PART = COLLECTIVES | {"copied_midway", "copied_with_optimizers", "averages"}
#: {habit: what DDP, or the program, cannot do with it}
APART = {
    **dict.fromkeys(["convolutional", "weight_normed", "conditional", "partial"], FORWARDS),
    **dict.fromkeys(["in_parts", "mesh"], ON_A_PART),
    "idle_part": ON_A_PART | {"group_made"},
    "joined": COLLECTIVES | SECOND | FORWARDS | {"group_made", "one_updates"},
    "step_raises@some": COLLECTIVES | SECOND | {"closures", "lbfgs", "one_updates", "optimizer_copied_midway",
                                                "copied_midway", "copied_with_optimizers", *ON_LEGATO.split()},
    "one_updates": {"lbfgs", "closures", "late_optimizer", "step_raises", "two_models_one_optimizer", "states_changed",
                    "optimizer_copied_midway", "group_added_later", "step_hooks", *ON_LEGATO.split()},
}  # fmt: skip


def size_of(seed):
    return random.Random(f"{seed} ranks").choice([2, 2, 3, 4])


def drawn(seed, auto=False, really=False, without=()):
    """The names of the habits that a seed stands for, `without` some."""
    rng, size = random.Random(f"{seed} habits of ranks"), size_of(seed)
    left_out = INEXACT if size > 2 else set()
    models, usual, some, part = (
        [name for name in names if name.partition("@")[0] not in left_out]
        for names in (HABITS["model"], HABITS["other"], SOME, PART)
    )
    of = rng.choice(models)
    by = rng.choice(["sgd", "adagrad"] if of == "sparse" else list(HABITS["optimizer"]))
    ways = ["", "", "", "in_parts", "in_parts", "idle_part", *["mesh"] * (size == 4)]
    names = [of, by, *["real"] * really, rng.choice(ways)]
    names += [name for name in ("group_made", "one_updates") if rng.random() < 0.2]
    names += [f"{name}@some" for name in rng.sample([*HABITS["alone"], *OFTEN], rng.randint(0, 2))]
    names += [f"{name}@some" for name in rng.sample(some, rng.randint(1, 3))]
    names += [f"{name}@part" for name in rng.sample(part, rng.randint(0, 2)) if {"in_parts", "mesh"} & {*names}]
    names += rng.sample(usual, rng.randint(0, 2))
    names = [name for name in dict.fromkeys(names) if name and name.partition("@")[0] not in without]
    for name in list(names):
        apart = APART.get(name.removesuffix("@part"), ()) if name in names else ()
        names = [other for other in names if not {other, other.partition("@")[0]} & {*apart}]
    return names


def run(seed, names, kind, *options):
    """`programs.run`, where ranks differ."""
    with contextlib.ExitStack() as stack:
        if dist.get_world_size() > 2:
            made = {name: exactly(getattr(DDP, name)) for name in ("__init__", "__setstate__")}
            stack.enter_context(patch.multiple(DDP, **made))
        if "real" in names:
            in_time = lambda seed: contextlib.nullcontext([])  # noqa: E731
            stack.enter_context(patch.multiple(programs, drawn_decisions=real_decisions, late_messages=in_time))
        return programs.run(seed, names, kind, *options)


def exactly(method):
    """A method that makes or copies a DDP, whose gradients then have exact averages in any order of additions."""

    @functools.wraps(method)
    def exact(ddp, *arguments, **options):
        method(ddp, *arguments, **options)
        ranks = ddp.process_group.size()
        unit = ranks * 2.0**-14

        @torch.no_grad()
        def round_off(p):
            rounded = (p.grad / unit).round().clamp(-(2**19), 2**19) * unit
            p.grad.copy_(torch.where(p.grad.isfinite(), rounded, p.grad))

        for p in ddp.module.parameters():
            if p.requires_grad and ranks > 2:
                p.register_post_accumulate_grad_hook(round_off)

    return exact


@contextlib.contextmanager
def real_decisions(job):
    """Networks are measured once, and plans made without another process; all else is as in a real training."""
    import legato.auto

    with patch.multiple(legato.auto, calibrate=_calibrated_once, _planned=_planned_here):
        yield


class Pool(programs.Pool):
    """Ranks for such programs."""

    program, command = staticmethod(run), "support.differing"

    def run(self, seed, names, kind, long=False):
        results = super().run(seed, names, kind, long)
        if "group_made" in names and self._runs:  # torch counts a rank's own groups in the names of the next
            self.renew()
        return results


@contextlib.contextmanager
def pools():
    """A function that returns the ranks for a seed."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def of(size):
            return stack.enter_context(contextlib.closing(Pool(size)))

        yield lambda seed: of(size_of(seed))


def check(seeds, kind):
    """Fail unless the programs of these seeds are equal or refused, and most of them equal."""
    with pools() as pool_of:
        programs.check(seeds, kind, pool_of=pool_of, drawn_for=lambda seed: drawn(seed, kind == "auto"))


def main():
    parser = programs.arguments()
    parser.add_argument("--real", action="store_true", help="programs so long that legato decides by real times")
    parser.add_argument("--without", default="", help="habits that are left out, separated by commas")
    options = parser.parse_args()
    programs.AFTER_A_FAILURE_S = 20  # other parts may go on
    if options.real:
        programs.PATIENCE_S.update(dict.fromkeys(programs.PATIENCE_S, 180))
    with pools() as pool_of:
        programs.explore(
            options, pool_of, lambda seed: drawn(seed, options.auto, options.real, options.without.split(","))
        )


if __name__ == "__main__":
    main()
