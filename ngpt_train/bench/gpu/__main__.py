"""`python -m ngpt_train.bench.gpu`, for machines without the packages that the command line needs."""

import sys

from ngpt_train.bench.gpu.protocol import main

sys.exit(main())
