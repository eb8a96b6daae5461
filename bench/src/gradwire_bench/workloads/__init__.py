"""Models and data of the demo and of ``gradwire bench train``, and replicas trained in
one process.

``transformer``, ``gpt``, ``lstm`` and ``convnet`` hold models; ``fashion_mnist`` and
``text`` read real data that a machine has or its user puts there, none of it shipped,
and ``patterns`` makes images. A ``task`` is a model with its data, and ``train`` trains
one by any exchange. This package may import all that makes and runs exchanges, but not
``torch.distributed``.
"""
