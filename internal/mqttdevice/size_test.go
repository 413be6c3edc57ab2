package mqttdevice

import (
	"reflect"
	"testing"
)

// There is one for every connected device, and a byte more than 512 takes 64.
func TestSize(t *testing.T) {
	if n := reflect.TypeFor[conn]().Size(); n > 512 {
		t.Errorf("%d bytes", n)
	}
}
