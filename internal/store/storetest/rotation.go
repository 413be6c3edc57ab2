package storetest

import (
	"testing"
	"time"

	"fleetd/internal/devices"
)

func testRotation(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	r, err := s.LoadRotation(t.Context())
	if err != nil || r != (devices.Rotation{}) {
		t.Fatalf("%+v, %v", r, err)
	}
	first := devices.Rotation{Generation: 1, PreviousUntil: start}
	second := devices.Rotation{Generation: 5, Previous: 1, PreviousUntil: start.Add(time.Hour)}
	for _, step := range []struct {
		old, next devices.Rotation
		want      error
	}{{first, second, devices.ErrRotated}, {r, first, nil}, {r, second, devices.ErrRotated}, {first, second, nil}, {first, second, devices.ErrRotated}} {
		if err := s.SwapRotation(t.Context(), step.old, step.next); step.want == nil && err != nil {
			t.Fatal(err)
		} else if step.want != nil {
			mustBe(t, err, step.want)
		}
	}
	if r, err = s.LoadRotation(t.Context()); err != nil || r != second {
		t.Errorf("%+v, %v", r, err)
	}
}
