/* Attribute names of vLLM's objects, interned once. */
#include "kvdpy.h"

kvdpy_names_t kvdpy_names;

int kvdpy_names_init(void)
{
#define KVDPY_NAME(name) {#name, &kvdpy_names.name},
	static const struct {
		const char *text;
		PyObject **p_name;
	} all[] = {KVDPY_NAMES(KVDPY_NAME)};
#undef KVDPY_NAME

	for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
		*all[i].p_name = PyUnicode_InternFromString(all[i].text);
		if (!*all[i].p_name) {
			return -1;
		}
	}

	return 0;
}
