"""The architectures. Importing this needs torch alone."""

from ngpt_train.models.decoder import Decoder, ParameterGroup
from ngpt_train.models.registry import build_model
from ngpt_train.models.weights import export_gradients, export_weights, load_weights

__all__ = ["Decoder", "ParameterGroup", "build_model", "export_gradients", "export_weights", "load_weights"]
