#!/bin/sh
cd "$(dirname "$0")" || exit
trtexec --onnx=r2trt.onnx --saveEngine=r2trt.onnx.engine --stronglyTyped --minShapes=x:1x3x32x32 --optShapes=x:4x3x32x32 --maxShapes=x:4x3x32x32
