/* Sizes, durations, and the nearest name. */
#include "kv/units.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

typedef struct unit {
	const char *name;
	uint64_t factor;
} unit_t;

#define MAX_VALUE           ((uint64_t)INT64_MAX)
#define MAX_FRACTION_DIGITS 9u

/* The first entry of each factor is how it is written; ascending. */
static const unit_t sizes[] = {
	{"B", 1},
	{"kB", 1000},
	{"KB", 1000},
	{"KiB", 1u << 10},
	{"MB", 1000000},
	{"MiB", 1u << 20},
	{"GB", 1000000000},
	{"GiB", 1u << 30},
	{"TB", UINT64_C(1000000000000)},
	{"TiB", UINT64_C(1) << 40},
	{"PB", UINT64_C(1000000000000000)},
	{"PiB", UINT64_C(1) << 50},
};

static const unit_t durations[] = {
	{"ns", 1},
	{"us", 1000},
	{"ms", 1000000},
	{"s", 1000000000},
	{"m", UINT64_C(60000000000)},
	{"h", UINT64_C(3600000000000)},
	{"d", UINT64_C(86400000000000)},
};

/* Digits at *p_text; how many there were. Leaves *p_text behind them. 0 digits, or a value over MAX_VALUE: *p_value is
 * unset. */
static unsigned take_digits(const char **p_text, unsigned max_digits, uint64_t *p_value)
{
	const char *at = *p_text;
	uint64_t value = 0;
	unsigned n = 0;

	for (; *at >= '0' && *at <= '9'; at++, n++) {
		uint64_t digit = (uint64_t)(*at - '0');

		if (n == max_digits || value > (MAX_VALUE - digit) / 10) {
			return 0;
		}
		value = value * 10 + digit;
	}
	*p_text = at;
	*p_value = value;

	return n;
}

static const unit_t *find_unit(const unit_t *units, size_t count, const char *name)
{
	for (size_t i = 0; i < count; i++) {
		if (strcmp(units[i].name, name) == 0) {
			return &units[i];
		}
	}

	return NULL;
}

/* "1.5GiB": whole, fraction, unit. `bare` is the unit of a number without one; NULL: refused unless it is 0. */
static kv_status_t parse_quantity(const char *text, const unit_t *units, size_t count, const unit_t *bare,
				  uint64_t *p_value)
{
	uint64_t whole, fraction = 0, scale = 1, value;
	const unit_t *unit = bare;

	if (take_digits(&text, UINT_MAX, &whole) == 0) {
		return KV_ERR_ARG;
	}
	if (*text == '.') {
		unsigned digits;

		text++;
		digits = take_digits(&text, MAX_FRACTION_DIGITS, &fraction);
		if (digits == 0) {
			return KV_ERR_ARG;
		}
		while (digits-- > 0) {
			scale *= 10;
		}
	}

	if (*text != '\0') {
		unit = find_unit(units, count, text);
	} else if (scale > 1) {
		unit = NULL;
	} else if (!unit && whole == 0) {
		unit = units;
	}
	if (!unit || __builtin_mul_overflow(whole, unit->factor, &value) || value > MAX_VALUE) {
		return KV_ERR_ARG;
	}

	/* factor / scale first would lose digits; neither term is above 2^63 (fraction < scale), so their sum fits. */
	value += (uint64_t)((__extension__(unsigned __int128) fraction * unit->factor) / scale);
	if (value > MAX_VALUE) {
		return KV_ERR_ARG;
	}
	*p_value = value;

	return KV_OK;
}

kv_status_t kv_parse_size(const char *text, uint64_t *p_bytes)
{
	return parse_quantity(text, sizes, sizeof sizes / sizeof sizes[0], &sizes[0], p_bytes);
}

kv_status_t kv_parse_duration(const char *text, uint64_t *p_ns)
{
	return parse_quantity(text, durations, sizeof durations / sizeof durations[0], NULL, p_ns);
}

kv_status_t kv_parse_u64(const char *text, uint64_t *p_value)
{
	uint64_t value = 0;

	if (*text == '\0') {
		return KV_ERR_ARG;
	}
	for (; *text; text++) {
		if (*text < '0' || *text > '9' || __builtin_mul_overflow(value, 10u, &value) ||
		    __builtin_add_overflow(value, (uint64_t)(*text - '0'), &value)) {
			return KV_ERR_ARG;
		}
	}
	*p_value = value;

	return KV_OK;
}

/* At most two decimals, rounded down, none that are zero. */
static char *format_quantity(uint64_t value, const unit_t *unit, char *out, size_t cap)
{
	uint64_t whole = value / unit->factor;
	unsigned hundredths = (unsigned)((double)(value % unit->factor) * 100.0 / (double)unit->factor);
	int n;

	if (hundredths == 0) {
		n = snprintf(out, cap, "%llu%s", (unsigned long long)whole, unit->name);
	} else if (hundredths % 10 == 0) {
		n = snprintf(out, cap, "%llu.%u%s", (unsigned long long)whole, hundredths / 10, unit->name);
	} else {
		n = snprintf(out, cap, "%llu.%02u%s", (unsigned long long)whole, hundredths, unit->name);
	}
	(void)n;

	return out;
}

char *kv_format_size(uint64_t bytes, char *out, size_t cap)
{
	static const unit_t shown[] = {
		{"PiB", UINT64_C(1) << 50}, {"TiB", UINT64_C(1) << 40}, {"GiB", 1u << 30},
		{"MiB", 1u << 20},          {"KiB", 1u << 10},
	};

	for (size_t i = 0; i < sizeof shown / sizeof shown[0]; i++) {
		if (bytes >= shown[i].factor) {
			return format_quantity(bytes, &shown[i], out, cap);
		}
	}

	return format_quantity(bytes, &sizes[0], out, cap);
}

char *kv_format_duration(uint64_t ns, char *out, size_t cap)
{
	size_t i = sizeof durations / sizeof durations[0] - 1;

	if (ns == 0) {
		i = 3; /* "0s" */
	} else {
		while (ns < durations[i].factor) {
			i--;
		}
	}

	return format_quantity(ns, &durations[i], out, cap);
}

/* Optimal string alignment distance: insert, delete, replace, or swap two neighbours. */
#define NEAREST_MAX 96u

static unsigned min2(unsigned a, unsigned b)
{
	return a < b ? a : b;
}

static unsigned edit_distance(const char *a, size_t a_len, const char *b, size_t b_len)
{
	unsigned row[3][NEAREST_MAX + 1];
	unsigned *before = row[0], *last = row[1], *now = row[2];

	for (unsigned j = 0; j <= b_len; j++) {
		last[j] = j;
	}
	for (unsigned i = 1; i <= a_len; i++) {
		unsigned *spare = before;

		now[0] = i;
		for (unsigned j = 1; j <= b_len; j++) {
			unsigned d = last[j - 1] + (a[i - 1] != b[j - 1]);

			d = min2(d, min2(last[j], now[j - 1]) + 1);
			if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
				d = min2(d, before[j - 2] + 1);
			}
			now[j] = d;
		}
		before = last;
		last = now;
		now = spare;
	}

	return last[b_len];
}

const char *kv_nearest(const char *word, const char *const *names, size_t count)
{
	size_t len = strlen(word);
	unsigned limit = len / 3 > 2 ? (unsigned)(len / 3) : 2;
	const char *best = NULL;

	if (len > NEAREST_MAX) {
		return NULL;
	}
	for (size_t i = 0; i < count; i++) {
		size_t name_len = strlen(names[i]);
		unsigned d;

		if (name_len > NEAREST_MAX) {
			continue;
		}
		d = edit_distance(word, len, names[i], name_len);
		if (d <= limit && (!best || d < limit)) {
			best = names[i];
			limit = d;
		}
	}

	return best;
}
