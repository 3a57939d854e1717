"""From calibration data to integers: what values hold, which of them become integers, and with which scales."""
