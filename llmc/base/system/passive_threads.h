// How threads of OpenMP wait for work.
#pragma once

// Lets waiting threads of OpenMP sleep instead of spin: a spinning thread takes its core from whatever else runs there,
// and one other busy process on two cores makes a step 29 times as long. OpenMP reads its environment before main, so
// this sets OMP_WAIT_POLICY=passive and starts the program again in the same process. A variable that the user set
// (OMP_WAIT_POLICY or GOMP_SPINCOUNT) is left as it is. Must be called first in main. If the program cannot be started
// again, it goes on with spinning threads: only its speed depends on it.
void start_with_passive_threads(const char* const* argv);
