// How the blocks of one launch hand values to each other: words of 8 bytes, of which the upper half says when.
//
// A value and the number of its round are written by one store and read by one load, so that who finds the number has
// the value too: no fence, no counter, and one way through L2 each, about half of what a barrier over the grid takes.
// A word is written again only when all who read it have told so, by what they handed on since.
#pragma once

#include "types.cuh"

struct alignas(16) WordPair {
  u64 first, second;
};

DEVICE void send_word(u64* to, u32 value, u32 round) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((u64)round << 32 | value) : "memory");
}

DEVICE WordPair look_at_words(const u64* from) {
  WordPair pair;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(pair.first), "=l"(pair.second) : "l"(from) : "memory");
  return pair;
}

DEVICE bool is_of(u64 word, u32 round) { return (u32)(word >> 32) == round; }

DEVICE u32 receive_word(const u64* from, u32 round) {
  u64 word;
  do asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  while (!is_of(word, round));
  return (u32)word;
}

// Receives `rows` rows of `columns` words, which is even: use(row, column, value, value of the next column, prepared), where
// prepared = prepare(column) is computed before the word is waited for. `threads` threads share a row; loads of a thread
// are on their way together.
template <class Prepare, class Use>
DEVICE void receive_rows(const u64* from, u32 rows, u32 columns, u32 round, u32 threads, Prepare prepare, Use use) {
  constexpr int BATCH = 4;
  const u32 items = (columns + 2 * threads - 1) / (2 * threads) * rows;
  u32 row = 0, column = 2 * threadIdx.x;
#pragma unroll 1
  for (u32 item = 0; item < items; item += BATCH) {
    WordPair got[BATCH];
    u32 rows_of[BATCH], columns_of[BATCH];
    decltype(prepare(0)) prepared[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      rows_of[i] = row, columns_of[i] = item + i < items ? column : columns;
      if (++row == rows) row = 0, column += 2 * threads;
      if (columns_of[i] < columns) prepared[i] = prepare(columns_of[i]);
    }
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (columns_of[i] < columns) got[i] = look_at_words(from + (u64)rows_of[i] * columns + columns_of[i]);
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (columns_of[i] < columns) all &= is_of(got[i].first, round) & is_of(got[i].second, round);
    } while (!all);
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (columns_of[i] < columns) use(rows_of[i], columns_of[i], (u32)got[i].first, (u32)got[i].second, prepared[i]);
  }
}
