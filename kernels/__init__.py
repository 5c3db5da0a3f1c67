"""Quantised matmul kernels, their dispatch, gate and calibration. Knows no model."""
