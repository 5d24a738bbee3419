"""The mathematics written down a second time: plain PyTorch from the equations, nothing from `ngpt_train`.

Weights come in a dict with the canonical names and shapes of `ngpt_train.models.export_weights`; every function
works in any float dtype and under autograd. Clarity is the only aim here; nothing is fused or fast.
"""
