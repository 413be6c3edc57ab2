package devices

import (
	"reflect"
	"testing"
	"time"
)

// A device that is forgotten keeps the generation of its credentials and its refused clients, so that neither is valid again
// when it comes back.
func TestForgottenMember(t *testing.T) {
	var none Refused
	kept := Member{ID: "02:00:00:00:00:01", Generation: 3, Previous: 2, PreviousUntil: time.Unix(1e9, 0), Reason: "rotated", Refused: none.With("a copy")}
	m := kept
	m.Admission, m.ClientID, m.Name, m.Serial, m.FirstSeen = AdmissionMember, "client", "kitchen", "SN1", time.Unix(1, 0)
	if err := m.Fold(Change{Revision: 9, Device: m.ID, Aspect: AspectAdmission, Value: []byte(`"forgotten"`)}); err != nil {
		t.Fatal(err)
	}
	kept.Revision = 9
	if !reflect.DeepEqual(m, kept) {
		t.Errorf("%+v, want %+v", m, kept)
	}
}
