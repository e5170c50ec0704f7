"""The papers' models as workloads: no download, no training framework.

Numbers of parameters and sizes equal the published ones in all printed digits; each model's file says which definition
of the model gives these numbers. If papers use the same name for different models, each of these models has its own
name here.

- TicTac, Table 1: `alexnet-v2` `inception-v1` `inception-v2` `inception-v3` `resnet-v1-50` `resnet-v1-101`
  `resnet-v2-50` `resnet-v2-101` `vgg-16` `vgg-19`
- Caramel, section 6: `alexnet-v2` `inception-v3` `resnet-v1-50` `resnet-v2-152` `vgg-16`
- PACE, Table II: `vgg-16` `resnet-v2-50-mxnet` `seq2seq` `transformer`
- MG-WFBP, section VI: `googlenet` `resnet-v1-50-caffe`
- Network Operator Edition, Tables 2 and 7: `vgg-16-299` `inception-v3` `resnet-v2-101-gamma` `resnet-v2-200-gamma`
- the models' own papers: `transformer-shared` `bert-base` `gpt2` `gpt2-medium` `gpt2-large` `gpt2-xl`
- in no paper, but the fourth of its family: `resnet-v2-200`
- recent language models, and models of any other shape (`legato.zoo.language`): `gpt3` `llama-3-8b` `llama-3-70b`
  `llama-3-405b` `mixtral-8x7b`

These published numbers cannot be matched:

- *Numbers of operations* (TicTac's #Ops, PACE's computation operators): they count the nodes of a TensorFlow graph with
  its summaries and constants, and the nodes of an MXNet graph in which one node computes both gradients of a
  convolution. Here an op is one computation on a device: each layer has one op in the forward pass, and one or two in
  the backward pass.
- *Network Operator Edition, Table 2* truncates some numbers and rounds others. Inception-v3 with 0.715 Gb matches no
  variant of the model (0.869 with the auxiliary classifier, 0.762 without it, and 0.697 without the output layers as
  well). ResNet-200 has 2.06 Gb in the table. Here ResNet-200 has 2.071 Gb with gamma, as in the paper's Table 7, and
  2.069 Gb without. ResNet-101 has 1.3e10 FLOPs in the table and 1.44e10 here. The table's numbers of weights do not fit
  the sizes in the same table.
- *PACE, Table II* gives no configuration of Seq2Seq and Transformer. Here these models have exactly the published
  tensors, and vocabularies that were inferred.
- *Transformer, Table 3* (65 million) and *GPT-2, Table 2* (117 million and so on): the released models have other
  numbers, which are used here.

Times come from FLOPs and memory traffic on a `Device`, or from published totals.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from legato.core.errors import InputError, unknown_name
from legato.core.job import Machine
from legato.core.workload import Phase, Workload
from legato.zoo import alexnet, bert, gpt2, inception_v1, inception_v2, inception_v3, resnet, seq2seq, transformer, vgg
from legato.zoo.builder import DEFAULT_DEVICE, Layer, Model, Variable
from legato.zoo.device import PRECISIONS, Device
from legato.zoo.language.graph import SHAPES, language_model
from legato.zoo.language.models import shaped
from legato.zoo.language.one_gpu import job_of_one_gpu, part_times
from legato.zoo.lower import lower
from legato.zoo.presets import DEVICES, MACHINES, device_named, machine_named

__all__ = [
    "DEFAULT_DEVICE",
    "DEVICES",
    "MODELS",
    "PRECISIONS",
    "SHAPES",
    "Device",
    "Layer",
    "Model",
    "Variable",
    "device_for",
    "device_named",
    "language_model",
    "model",
    "shaped",
    "variables",
    "workload",
]

#: Every model by its name.
MODELS: dict[str, Callable[[], Model]] = {
    "alexnet-v2": alexnet.alexnet_v2,
    "inception-v1": inception_v1.inception_v1,
    "inception-v2": inception_v2.inception_v2,
    "inception-v3": inception_v3.inception_v3,
    "googlenet": inception_v1.googlenet,
    "resnet-v1-50": resnet.resnet_v1_50,
    "resnet-v1-50-caffe": resnet.resnet_v1_50_caffe,
    "resnet-v1-101": resnet.resnet_v1_101,
    "resnet-v2-50": resnet.resnet_v2_50,
    "resnet-v2-50-mxnet": resnet.resnet_v2_50_mxnet,
    "resnet-v2-101": resnet.resnet_v2_101,
    "resnet-v2-101-gamma": resnet.resnet_v2_101_gamma,
    "resnet-v2-152": resnet.resnet_v2_152,
    "resnet-v2-200": resnet.resnet_v2_200,
    "resnet-v2-200-gamma": resnet.resnet_v2_200_gamma,
    "vgg-16": vgg.vgg_16,
    "vgg-16-299": vgg.vgg_16_299,
    "vgg-19": vgg.vgg_19,
    "seq2seq": seq2seq.seq2seq,
    "transformer": transformer.transformer,
    "transformer-shared": transformer.transformer_shared,
    "bert-base": bert.bert_base,
    "gpt2": gpt2.gpt2,
    "gpt2-medium": gpt2.gpt2_medium,
    "gpt2-large": gpt2.gpt2_large,
    "gpt2-xl": gpt2.gpt2_xl,
    **{name: partial(language_model, shape, name) for name, shape in SHAPES.items()},
}


def model(name: str) -> Model:
    """Return a model's layers and variables. Raises `InputError`, with the nearest names, on an unknown model."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return MODELS[name]()


def variables(name: str) -> tuple[Variable, ...]:
    """Return all variables of a model, including those that are not trained, in the order of their creation.

    TensorFlow distributes variables over parameter servers by round robin in this order (Network Operator Edition,
    Table 7). Raises `InputError` as `model` does.
    """
    return model(name).variables


def device_for(model: Model, name: str | None = None) -> Device | Machine:
    """Return the device with this name, by default the model's own device.

    For a language model, the name may be a machine's or a `.json` file's; the result is then a `Machine`. Raises
    `InputError`, which lists the nearest names, on an unknown name, and `FileError` on a file without a machine.
    """
    name = model.device if name is None else name
    if model.language is not None and (name in MACHINES or name.endswith(".json")):
        return machine_named(name)
    return device_named(name)


def workload(  # noqa: PLR0913
    name: str | Model,
    *,
    batch_size: int | None = None,
    device: str | Device | Machine | None = None,
    forward_s: float | None = None,
    backward_s: float | None = None,
    precision: str | None = None,
    gradients: str | None = None,
    recompute: bool = False,
    accumulate: int = 1,
    replica_devices: int = 1,
) -> Workload:
    """Return one training iteration of a model on one worker; `name` is a model or the name of a model.

    `batch_size` counts samples (images, sentences); the default comes from the paper that uses the model. `device` is
    any `Device` or the name of one in `DEVICES`, and `precision` is one of `PRECISIONS`. The defaults are `v100` and
    `fp32`, and for language models `h100` and `bf16`. If `device` is a `Machine` (`legato.zoo.presets` has some), a
    language model computes as long as a whole job on one GPU (`legato.zoo.language.layer`), and twice as long in fp32.
    If `forward_s` or `backward_s` (seconds) is given, such as a published total, the ops of that pass are scaled to add
    up to it. `gradients` is the precision in which gradients are sent, by default the precision of the computation.

    For large models, `recompute` repeats the forward pass of each block in the backward pass. `accumulate` divides the
    batch into this number of micro-batches, and only the last one sends the gradients. `replica_devices` divides the
    model and its batch among several devices; the workload describes one of these devices (`legato.zoo.lower`).

    Raises `InputError` on unknown names, on a precision that the device lacks, on
    numbers that are not above zero, on a batch that `accumulate` does not divide,
    and on `recompute` for a model that has no blocks.
    """
    built = model(name) if isinstance(name, str) else name
    if device is None or isinstance(device, str):
        device = device_for(built, device)
    precision = built.precision if precision is None else precision
    parts = None
    if isinstance(device, Machine):
        if (language := built.language) is None:
            raise InputError(f"{built.name}: no language model (expected a Device, not a Machine)")
        half = 0.5 if precision == "fp32" else 1.0
        machine = replace(
            device, flops_per_s=half * device.flops_per_s, memory_bytes_per_s=half * device.memory_bytes_per_s
        )
        device = Device.of(device)

        def parts(batch: int) -> dict[tuple[str, Phase], float]:
            return part_times(job_of_one_gpu(built.name, language, machine, batch, recompute=recompute))

    return lower(
        built,
        device,
        batch_size=batch_size,
        forward_s=forward_s,
        backward_s=backward_s,
        precision=precision,
        gradients=gradients,
        recompute=recompute,
        accumulate=accumulate,
        replica_devices=replica_devices,
        parts=parts,
    )
