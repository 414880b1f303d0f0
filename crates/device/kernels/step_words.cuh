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

// Words whose loads are on their way together.
DEVICE u64 look_at_word(const u64* from) {
  u64 word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
DEVICE void receive_words(u32 round, const u64* from, u32& x, const u64* from2, u32& y) {
  u64 word, word2;
  do word = look_at_word(from), word2 = look_at_word(from2);
  while (!(is_of(word, round) & is_of(word2, round)));
  x = (u32)word, y = (u32)word2;
}
DEVICE void receive_words(u32 round, const u64* from, u32& x, const u64* from2, u32& y, const u64* from3, u32& z) {
  u64 word, word2, word3;
  do word = look_at_word(from), word2 = look_at_word(from2), word3 = look_at_word(from3);
  while (!(is_of(word, round) & is_of(word2, round) & is_of(word3, round)));
  x = (u32)word, y = (u32)word2, z = (u32)word3;
}

// threadIdx.x, read again: what is computed from it is not kept in registers all through a layer.
DEVICE u32 thread_anew() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Receives `rows` rows of `columns` words, which is even: use(row, column, value, value of the next column, prepared), where
// prepared = prepare(column) is computed before the word is waited for. `threads` threads share a row; loads of a thread
// are on their way together, up to BATCH of them.
template <int BATCH, class Prepare, class Use>
DEVICE void receive_rows(const u64* from, u32 rows, u32 columns, u32 round, u32 threads, Prepare prepare, Use use) {
  const u32 items = (columns + 2 * threads - 1) / (2 * threads) * rows;
  u32 row = 0, column = 2 * thread_anew();
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
