// What the log says of a step, from what the device returned.
#pragma once
#include "llmc/train/batch_queue.h"
#include "llmc/train/log/log.h"

// Of a step that has finished. The caller adds what a single step does not know: memory, MFU, skipped steps, time left.
StepRecord step_record(const Config& config, const Staging::Slot& slot);
