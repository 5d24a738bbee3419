"""`audit`: trains parts of a finished run again, and says whether its records are what its config, its code and its
data give."""

from ngpt_train.study.audit.certificate import CERTIFICATE, read_certificates

__all__ = ["CERTIFICATE", "read_certificates"]
