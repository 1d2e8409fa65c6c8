// `train_llama export-fp8 --load CHECKPOINT --out DIR`: the model of a checkpoint with the FP8 weights that its run
// trained with, in the layouts that transformers and vLLM read.
#pragma once
#include <string>

#include "llmc/commands/command.h"
#include "llmc/parallel/comm/comm.h"

Job parse_export_fp8(const Invocation& call, Comm& comm);

// Writes the directory `out`, which must not exist. Weights of linears in FP8 are quantized from the checkpoint's
// masters by the trainer's own operation, with the scales of its state.json if the recipe has histories:
//
//   blockwise             quant_method fp8, as DeepSeek-V3 is published: NAME.weight F8_E4M3 (out, in) and
//                         NAME.weight_scale_inv F32 (ceil(out / 128), ceil(in / 128))
//   delayed, tensorwise   quant_method compressed-tensors, format float-quantized: NAME.weight and NAME.weight_scale
//                         F32 (1)
//
// A code times its scale_inv is the weight of the run, to the bit. Some linears are exported in BF16 and listed in
// modules_to_not_convert (compressed-tensors: ignore): those that ran in BF16; the head, which no reader accepts in
// FP8; and with `blockwise` those with a side that is not a multiple of 128. The last ones are exact, too, since BF16
// can hold a code times a power of two.
//
// checkpoint: a directory. max_part_bytes: the largest size of a file. Returns what was written, in a line or two for
// people. Exit 2 if the directory is not a checkpoint of a run in FP8, or if no reader accepts its shape in FP8; 5 if
// it is damaged; 7 if the disk fails.
std::string export_fp8(const std::string& checkpoint, const std::string& out, int64_t max_part_bytes);
