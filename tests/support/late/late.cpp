// One unit of translation: torch's headers take most of the time of a compilation.
#include "device.cpp"
#include "executor.cpp"
#include "group.cpp"
