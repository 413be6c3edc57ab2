package mqttdevice

import (
	"reflect"
	"testing"
)

// There is one for every connected device, and a byte more than 384 takes 32.
func TestSize(t *testing.T) {
	if n := reflect.TypeFor[conn]().Size(); n > 384 {
		t.Errorf("%d bytes", n)
	}
}
