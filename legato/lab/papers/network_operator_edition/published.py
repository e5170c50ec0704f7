"""The values that the paper prints, by its tables, and in its units: seconds, gigabits and factors."""

from __future__ import annotations

__all__ = [
    "GBPS",
    "MODELS",
    "TABLE_1",
    "TABLE_1_GBPS",
    "TABLE_1_WORKERS",
    "TABLE_2",
    "TABLE_3",
    "TABLE_4",
    "TABLE_6",
    "TABLE_7",
    "TABLE_8",
    "TABLE_9",
    "TABLE_10",
    "WORKERS",
]

#: The paper's names of models, and the zoo's. VGG-16 trains on 299x299 images; ResNets are v2 with gamma (Table 7).
MODELS = {
    "VGG-16": "vgg-16-299",
    "Inception-v3": "inception-v3",
    "Resnet-101": "resnet-v2-101-gamma",
    "Resnet-200": "resnet-v2-200-gamma",
}
#: The setting of all tables except 1 and 10.
WORKERS, GBPS = 32, 25.0
#: Table 1, "Sim": iteration time with 1, 2, 4 and 8 servers on 8 workers.
TABLE_1 = {
    "VGG-16": (21.0, 22.5, 19.3, 18.2),
    "Inception-v3": (2.29, 2.29, 1.37, 0.852),
    "Resnet-200": (7.15, 3.34, 2.3, 2.29),
    "Resnet-101": (4.57, 2.37, 1.52, 1.5),
}
#: The bandwidth is not printed; with 5 Gbps, all four models' times with one server are 2 x 8 workers x size / 5 Gbps.
TABLE_1_WORKERS, TABLE_1_GBPS = 8, 5.0
#: Table 2: weights, size in Gb, and FLOPs of a forward pass.
TABLE_2 = {
    "Inception-v3": (2.5e6, 0.715, 1.1e10),
    "VGG-16": (1.9e8, 6.58, 5.4e10),
    "Resnet-101": (2.2e6, 1.42, 1.3e10),
    "Resnet-200": (2.2e6, 2.06, 2.8e10),
}
#: Table 3: seconds of the forward pass, the backward pass after its first layer, and its transfers at 25 Gbps; ratio.
TABLE_3 = {
    "Inception-v3": (0.176, 0.296, 0.028, 10.6),
    "VGG-16": (0.169, 0.024, 0.263, 0.09),
    "Resnet-101": (0.176, 0.180, 0.052, 3.46),
    "Resnet-200": (0.357, 0.34, 0.082, 4.14),
}
#: Table 4: speedups by aggregation, by multicast, and by both.
TABLE_4 = {
    "Inception-v3": (1.34, 1.69, 3.28),
    "VGG-16": (1.89, 1.94, 22.0),
    "Resnet-101": (1.65, 1.79, 6.07),
    "Resnet-200": (1.65, 1.85, 6.7),
}
#: Table 6: speedups by ring, ring with multicast, and butterfly.
TABLE_6 = {
    "VGG-16": (24.6, 24.6, 11.3),
    "Resnet-200": (6.75, 6.76, 6.79),
    "Resnet-101": (6.55, 6.71, 6.46),
    "Inception-v3": (3.35, 3.41, 3.41),
}
#: Table 7: servers, model, shares of the least and most occupied server, and whether "Max" is the second largest share.
TABLE_7 = [
    (4, "VGG-16", 4e-5, 0.918, False),
    (8, "VGG-16", 1e-5, 0.859, False),
    (4, "Inception-v3", 0.0007, 0.451, True),
    (8, "Inception-v3", 0.0003, 0.292, False),
    (4, "Resnet-200", 0.165, 0.33, False),
    (8, "Resnet-200", 0.002, 0.22, True),
]
#: Table 8: iteration times of multicast with aggregation, of the same on 8 servers with even shares, and of ring.
TABLE_8 = {
    "VGG-16": (0.765, 0.539, 0.683),
    "Resnet-200": (0.830, 0.820, 0.824),
    "Resnet-101": (0.598, 0.551, 0.556),
    "Inception-v3": (0.569, 0.549, 0.562),
}
#: Table 9: time of two iterations of multicast with aggregation, of ring, and of the first without barrier.
TABLE_9 = {
    "VGG-16": (1.53, 1.37, 1.76),
    "Resnet-200": (1.65, 1.65, 1.65),
    "Resnet-101": (1.17, 1.13, 1.08),
    "Inception-v3": (1.14, 1.13, 0.988),
}
#: Table 10: model, Gbps, iteration times with aggregation and with block distribution.
TABLE_10 = [
    ("Inception-v3", 10, 2.99, 3.1),
    ("VGG-16", 10, 22.3, 21.7),
    ("Resnet-101", 10, 4.9, 4.94),
    ("Resnet-200", 10, 7.77, 7.79),
    ("Inception-v3", 100, 0.71, 0.77),
    ("VGG-16", 100, 2.23, 2.27),
    ("Resnet-101", 100, 0.89, 0.94),
    ("Resnet-200", 100, 1.19, 1.45),
]
