"""Models and data of the papers' experiments, and the training of replicas on them in one process.

``resnet18``, ``lstm``, ``ncf``, ``deepfm`` and ``transformer`` hold models; ``_fashion_mnist``,
``_text`` and ``_movielens`` read real data that a machine has or its user puts there, none of it
shipped; ``applications`` puts both together to tasks, and ``train`` trains one by any exchange.
Imports what makes and runs exchanges; must not import ``torch.distributed``.
"""
