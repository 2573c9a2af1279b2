/* The machine's ceiling: memcpy of rows picked by number, split over threads. */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
  const char *from;
  char *to;
  const int64_t *row;
  const int64_t *start;
  int64_t begin, end, stride, bytes;
} part_t;

/* Row i of the output is the `bytes` bytes at byte `start[i]` of row `row[i]` of the table. */
static void *copy_part(void *argument) {
  const part_t *p = argument;
  for (int64_t i = p->begin; i < p->end; ++i)
    memcpy(p->to + i * p->bytes, p->from + p->row[i] * p->stride + p->start[i], (size_t)p->bytes);
  return NULL;
}

/* Returns 0, or the error of pthread_create. */
int copy_rows(const char *from, char *to, const int64_t *row, const int64_t *start, int64_t rows, int64_t stride,
              int64_t bytes, int threads) {
  pthread_t ids[64];
  part_t parts[64];
  if (threads < 1 || threads > 64) return -1;
  for (int t = 0; t < threads; ++t) {
    part_t part = {from, to, row, start, rows * t / threads, rows * (t + 1) / threads, stride, bytes};
    parts[t] = part;
  }
  for (int t = 1; t < threads; ++t) {
    int error = pthread_create(&ids[t], NULL, copy_part, &parts[t]);
    if (error) return error;
  }
  copy_part(&parts[0]);
  for (int t = 1; t < threads; ++t) pthread_join(ids[t], NULL);
  return 0;
}
