package session

import (
	"reflect"
	"testing"
)

// There is one of each for every connected device, and a byte more takes the next size class of the heap.
func TestSize(t *testing.T) {
	for of, most := range map[reflect.Type]uintptr{
		reflect.TypeFor[Session](): 352,
		reflect.TypeFor[entry]():   192,
		reflect.TypeFor[stored]():  128,
	} {
		if n := of.Size(); n > most {
			t.Errorf("%v: %d bytes, want at most %d", of, n, most)
		}
	}
}
