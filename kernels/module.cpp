// overspill._kernels: what cpu_experts.py and mappings.py call. They check dtypes and shapes; addresses arrive here as
// numbers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <system_error>

#include "experts.hpp"
#include "mapping.hpp"
#include "paths.hpp"

namespace nb = nanobind;
using namespace overspill;

namespace {

const void* pointer(uintptr_t address) { return reinterpret_cast<const void*>(address); }
float* floats(uintptr_t address) { return reinterpret_cast<float*>(address); }

Choices choices(uintptr_t index, uintptr_t weights, size_t tokens, size_t each) {
    return {static_cast<const int64_t*>(pointer(index)), floats(weights), tokens, each};
}

}  // namespace

NB_MODULE(_kernels, module) {
    nb::set_leak_warnings(false);  // a process may end with weights in use
    nb::enum_<Type>(module, "Type")
        .value("float32", Type::float32)
        .value("bfloat16", Type::bfloat16)
        .value("float16", Type::float16);
    nb::enum_<Activation>(module, "Activation")
        .value("silu", Activation::silu)
        .value("gelu", Activation::gelu)
        .value("gelu_tanh", Activation::gelu_tanh)
        .value("relu", Activation::relu)
        .value("relu2", Activation::relu2);
    nb::class_<Path>(module, "Path").def_ro("name", &Path::name);
    module.def("path_named", [](const std::string& name) { return path_named(name.c_str()); }, nb::rv_policy::reference);
    module.def("path_names", [] {
        nb::list names;
        for (const char* name : path_names) names.append(name);
        return names;
    });

    const auto free = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<Experts>(module, "Experts")
        .def("__init__",
             [](Experts* made, uintptr_t up, uintptr_t down, uintptr_t up_bias, uintptr_t down_bias, Type type,
                size_t count, size_t hidden, size_t intermediate, bool gated, bool transposed) {
                 new (made) Experts{pointer(up), pointer(down), pointer(up_bias), pointer(down_bias), type,
                                    count, hidden, intermediate, gated, transposed};
             })
        .def(
            "compute",
            [](const Experts& experts, const Path& path, Activation activation, uintptr_t index, uintptr_t weights,
               size_t tokens, size_t each, uintptr_t hidden, uintptr_t out, Type type, int threads) {
                compute(path, experts, activation, choices(index, weights, tokens, each), pointer(hidden),
                        reinterpret_cast<void*>(out), type, threads);
            },
            free)
        .def(
            "compute_up",
            [](const Experts& experts, const Path& path, uintptr_t index, size_t tokens, size_t each, uintptr_t hidden,
               Type type, uintptr_t products, int threads) {
                compute_up(path, experts, choices(index, 0, tokens, each), pointer(hidden), type, floats(products),
                           threads);
            },
            free)
        .def(
            "compute_down",
            [](const Experts& experts, const Path& path, uintptr_t index, uintptr_t weights, size_t tokens, size_t each,
               uintptr_t gated, uintptr_t out, Type type, int threads) {
                compute_down(path, experts, choices(index, weights, tokens, each), floats(gated),
                             reinterpret_cast<void*>(out), type, threads);
            },
            free);
    module.def(
        "read_memory",
        [](const Path& path, uintptr_t address, size_t bytes, int threads) {
            return read_memory(path, pointer(address), bytes, threads);
        },
        free);

    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const std::system_error& error) {
            errno = error.code().value();
            PyErr_SetFromErrno(PyExc_OSError);
        }
    });
    module.def("guard_mappings", &guard_mappings);
    nb::class_<Mapping>(module, "Mapping")
        .def(nb::init<int, size_t>())
        .def_prop_ro("address", &Mapping::address)
        .def_prop_ro("bytes", &Mapping::bytes)
        .def_prop_ro("lost",
                     [](const Mapping& mapping) {
                         const size_t at = mapping.lost();
                         return at == Mapping::nowhere ? nb::object(nb::none()) : nb::object(nb::int_(at));
                     })
        .def("restore", &Mapping::restore)
        .def("populate", &Mapping::populate, free);
}
