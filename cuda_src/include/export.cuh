// The door from Python to an emulated kernel: arguments come as an array of pointers to values, as cuLaunchKernel takes them.
//
// STRATA_EXPORT(3af0, matvec<Odd4, 1>) defines strata_run_3af0 and strata_signature_3af0. The signature names each parameter by the
// NumPy code of its type, with r or w in front of what a pointer points to (const or not): "rf4 wi1 i4". The Python side
// refuses arguments that do not fit it, which a GPU would read as garbage.
#pragma once

namespace fibers {

template <class T> struct TypeCode;
template <> struct TypeCode<i8> { static constexpr const char* text = "i1"; };
template <> struct TypeCode<u8> { static constexpr const char* text = "u1"; };
template <> struct TypeCode<u16> { static constexpr const char* text = "u2"; };
template <> struct TypeCode<int> { static constexpr const char* text = "i4"; };
template <> struct TypeCode<u32> { static constexpr const char* text = "u4"; };
template <> struct TypeCode<i64> { static constexpr const char* text = "i8"; };
template <> struct TypeCode<u64> { static constexpr const char* text = "u8"; };
template <> struct TypeCode<float> { static constexpr const char* text = "f4"; };
template <> struct TypeCode<double> { static constexpr const char* text = "f8"; };

template <class T> struct Parameter { static constexpr const char* kind = "";  static constexpr const char* text = TypeCode<T>::text; };
template <class T> struct Parameter<const T*> { static constexpr const char* kind = "r";  static constexpr const char* text = TypeCode<T>::text; };
template <class T> struct Parameter<T*> { static constexpr const char* kind = "w";  static constexpr const char* text = TypeCode<T>::text; };

template <int... I> struct Indices {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { typedef Indices<I...> type; };

template <auto kernel> struct Entry;
template <class... P, void (*kernel)(P...)> struct Entry<kernel> {
  template <int... I> static void call(void** a, Indices<I...>) { kernel(*static_cast<P*>(a[I])...); }
  static void body(void** a) { call(a, typename Count<sizeof...(P)>::type()); }
  static int run(Launch* request, void** a) { return fibers::run(request, body, a); }
  static const char* signature() {
    static char text[8 * sizeof...(P) + 1];
    text[0] = 0;
    ((strcat(strcat(strcat(text, Parameter<P>::kind), Parameter<P>::text), " ")), ...);
    return text;
  }
};

}  // namespace fibers

#ifdef _WIN32
#define STRATA_PUBLIC extern "C" __declspec(dllexport)
#else
#define STRATA_PUBLIC extern "C" __attribute__((visibility("default")))
#endif
#define STRATA_EXPORT(ending, ...)                                                                                      \
  STRATA_PUBLIC int strata_run_##ending(fibers::Launch* l, void** a) { return fibers::Entry<__VA_ARGS__>::run(l, a); } \
  STRATA_PUBLIC const char* strata_signature_##ending() { return fibers::Entry<__VA_ARGS__>::signature(); }
