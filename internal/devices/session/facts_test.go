package session

import (
	"testing"

	"fleetd/internal/devices"
)

// The strings that are kept for all devices are those that many have in common.
func TestSerialsAreNotShared(t *testing.T) {
	s := &Hub{}
	f := s.shared(devices.Facts{Board: "box", Firmware: "2.4", ELF: "e1", Chip: "esp32", Language: "de", Serial: "s1"})
	if f.Serial != "s1" || f.Board != "box" {
		t.Errorf("%+v", f)
	}
	if _, kept := s.strings.m.Load("s1"); kept {
		t.Error("a serial number takes a place of those that many devices share")
	}
}
