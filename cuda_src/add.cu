// hidden[i] += delta[i], count floats: the end of a stage whose last product no norm adds.
#include "strata.cuh"

__global__ void __launch_bounds__(256) add(float* hidden, const float* delta, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) hidden[i] += delta[i];
}
