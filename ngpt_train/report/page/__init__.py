"""Pages with figures that open without a network, and what their pictures share."""
