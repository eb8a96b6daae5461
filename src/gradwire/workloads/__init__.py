"""Models and data of the demo and of ``gradwire bench train``, and replicas trained in one process.

``transformer`` and ``gpt`` hold models; ``fashion_mnist`` and ``text`` read real data that a
machine has or its user puts there, none of it shipped; ``task`` is what both make together, and
``train`` trains one by any exchange. Imports what makes and runs exchanges; must not import
``torch.distributed``.
"""
