// The log record of a step, from what the device returned.
#pragma once
#include "llmc/train/batch_queue.h"
#include "llmc/train/log/log.h"

// The record of a finished step. The caller adds what one step does not know: memory, MFU, skipped steps, time left.
StepRecord step_record(const Config& config, const Staging::Slot& slot);
