package node

import (
	"testing"

	"fleetd/internal/devices"
	"fleetd/internal/store"
	"fleetd/internal/store/ledger"
)

// addDevice makes a device a member, as a decision of an operator.
func addDevice(t *testing.T, s *store.Store, d devices.Device) {
	t.Helper()
	l := ledger.New(s, quiet)
	defer l.Close()
	out, err := l.Decide(t.Context(), []devices.Decision{{ID: string(d.ID), Device: d.ID, Who: "test", Decide: func(m *devices.Member) error {
		m.Admission, m.ClientID, m.Name = devices.AdmissionMember, d.ClientID, d.Name
		return nil
	}}})
	if err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
}
