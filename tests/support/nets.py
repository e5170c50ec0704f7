"""Chains of layers with a tensor each."""

from legato.core.workload import Op, Tensor, Workload


def chain(backward_s, forward_s, nbytes, updates_s=()):
    """Layers, given from the first one on; with `updates_s`, each tensor has an update."""
    layers = range(len(nbytes))
    ops = [Op(f"f{i}", "forward", forward_s[i], (i - 1,) if i else ()) for i in layers]
    ops += [Op(f"b{i}", "backward", backward_s[i], (2 * len(layers) - 2 - i,)) for i in reversed(layers)]
    ops += [Op(f"u{i}", "optimizer", seconds) for i, seconds in enumerate(updates_s)]
    readers = [(i, 2 * len(layers) + i) if updates_s else (i,) for i in layers]
    tensors = (Tensor(f"t{i}", nbytes[i], 2 * len(layers) - 1 - i, readers[i]) for i in layers)
    return Workload("chain", tuple(ops), tuple(tensors))


def in_turn(seconds, nbytes, forward_s=1e-3, names=None):
    """One forward op that reads all tensors, and gradients that become ready in this order, these seconds apart."""
    ops = [Op("f", "forward", forward_s)] + [Op(f"b{k}", "backward", s, (k,)) for k, s in enumerate(seconds)]
    names = names or [f"t{k}" for k in range(len(nbytes))]
    tensors = (Tensor(name, n, k, (0,)) for k, (name, n) in enumerate(zip(names, nbytes, strict=True), 1))
    return Workload("chain", tuple(ops), tuple(tensors))
