"""`python -m ngpt_train.bench.gpu`, where nothing but torch and triton is installed."""

import sys

from ngpt_train.bench.gpu.protocol import main

sys.exit(main())
