package fleet

import (
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
)

// NoteRefusal records that an adapter turned a request away before it became a
// call: for want of a token, or of a scope.
func (s *Service) NoteRefusal(by access.By, action string, id devices.ID, err error) {
	s.auditChange(by, audit.KindRefusal, action, id, "", err)
}

// NoteChange records what somebody did to a device, or tried to do.
func (s *Service) NoteChange(by access.By, action string, id devices.ID, detail string, err error) {
	s.auditChange(by, audit.KindDevice, action, id, detail, err)
}

// NoteCredential records a change of what proves devices, other than one
// device's own.
func (s *Service) NoteCredential(by access.By, action, detail string, err error) {
	s.auditChange(by, audit.KindCredential, action, "", detail, err)
}

// auditChange records a change that somebody made, or tried to make.
func (s *Service) auditChange(by access.By, kind audit.Kind, action string, id devices.ID, detail string, err error) {
	e := dispatch.EntryOf(time.Now(), by, kind, action, id)
	e.Detail, e.Outcome = detail, audit.OutcomeOK
	if err != nil {
		refusal := devices.AsError(err)
		e.Outcome, e.Rule, e.Detail = string(refusal.Code), refusal.Rule, strings.TrimPrefix(detail+": "+refusal.Detail, ": ")
	}
	s.Record(e)
}
