/* Lists of words in options. */
#include "options.h"

#include <string.h>

size_t kvd_list_word(const char *list, uint32_t n, const char **p_word)
{
	for (; n > 0; n--) {
		list = strchr(list, ',');
		if (!list) {
			return 0;
		}
		list++;
	}
	*p_word = list;

	return strcspn(list, ",");
}

int kvd_list_has(const char *list, const char *word)
{
	const char *at;
	size_t len;

	for (uint32_t i = 0; (len = kvd_list_word(list, i, &at)) > 0; i++) {
		if (strlen(word) == len && memcmp(at, word, len) == 0) {
			return 1;
		}
	}

	return 0;
}
