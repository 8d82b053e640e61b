// What both race programs need: ranks that are threads, joined before anything is judged.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

// Run body(k) for k in 0..count-1, each on a thread of its own.
template <class Body>
void run_threads(int count, Body body) {
  std::vector<std::thread> threads;
  for (int k = 0; k < count; ++k) threads.emplace_back([&body, k] { body(k); });
  for (std::thread& thread : threads) thread.join();
}

inline void require(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "wrong: %s\n", claim);
  std::exit(1);
}
