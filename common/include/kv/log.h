/* kv/log.h -- log lines: time, level, component, sentence with "key value" pairs, on standard error (or where set). */
#ifndef KV_LOG_H
#define KV_LOG_H

#include "kv/env.h"
#include "kv/status.h"

/* Process-wide; call before threads start. Levels above `level` are dropped. */
void kv_log_set_level(kv_log_level_t level);
kv_log_level_t kv_log_level(void);

/* Duplicate lines to this fd instead of standard error; -1: standard error. */
void kv_log_set_fd(int fd);

/* One line from any thread. Never blocks on a full pipe: the line is dropped and counted. */
void kv_log_line(kv_log_level_t level, const char *component, const char *line);
void kv_log(kv_log_level_t level, const char *component, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Lines dropped so far. */
uint64_t kv_log_dropped(void);

/* "error", "warn", "info", "debug". */
const char *kv_log_level_name(kv_log_level_t level);

#endif
