package restapi

import (
	"context"
	"net/http"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/timespan"
)

type rotateInput struct {
	DevicePath
	Body *api.Grace
}

type rotateAllInput struct{ Body *api.Grace }

func graceOf(b *api.Grace) (time.Duration, error) {
	if b == nil {
		return admission.DefaultGrace, nil
	}
	return parseGrace(b.Grace)
}

func parseGrace(text string) (time.Duration, error) {
	if text == "" {
		return admission.DefaultGrace, nil
	}
	grace, err := timespan.Parse(text)
	if err != nil {
		return 0, badRequest(`grace must be a duration such as "30d"`)
	}
	return grace, nil // its bounds are the core's to check
}

func (s *Server) rotateRoutes() {
	register(s, s.operation(http.MethodPost, "/v1/devices/{device}/rotate", about{id: "rotateDevice", scope: access.ScopeWrite, tag: tagDevices, summary: "Rotate a device's credentials",
		text: "It gets new ones at its next OTA check, which it makes when it boots. The old ones stay valid until it has connected with the new ones, or the grace is over. " +
			"What must die at once is revoked.",
		answer: "The device.", codes: []devices.Code{devices.CodeDeviceUnknown, devices.CodeUnavailable}}), s.rotateDevice)
	register(s, s.operation(http.MethodPost, "/v1/devices/rotate", about{id: "rotateDevices", scope: access.ScopeAdmin, tag: tagDevices, summary: "Rotate the credentials of all devices",
		text:   "As for one device, for every device there is and will be. Refused while the grace of the last time runs.",
		answer: "The generation of all credentials from now on.", codes: []devices.Code{devices.CodeUnavailable}}), s.rotateDevices)
}

type rotateSecretInput struct{ Body *api.SecretRotation }

func (s *Server) secretRoutes() {
	register(s, s.operation(http.MethodPost, "/v1/secret/rotate", about{id: "rotateSecret", scope: access.ScopeAdmin, tag: tagNodes, summary: "Rotate the fleet's secret",
		text: "All that derives from the secret is made from a new one: devices get new credentials as when all are rotated, nodes sign with it, and chip keys are sealed anew. " +
			"The admin token ends at once on every node that is reached. Refused while the grace of the last time runs, but for `admin_only`.",
		answer: "The number of the secret, and the new admin token.", codes: []devices.Code{devices.CodeUnavailable}}), s.rotateSecret)
}

func (s *Server) rotateSecret(ctx context.Context, in *rotateSecretInput) (*secret[api.RotatedSecret], error) {
	by := caller(ctx)
	var body api.SecretRotation
	if in.Body != nil {
		body = *in.Body
	}
	var r devices.Rotation
	var err error
	if body.AdminOnly {
		if body.Grace != "" {
			return nil, badRequest("admin_only has no grace: the admin token ends at once")
		}
		r, err = s.opt.Service.RotateAdmin(ctx, by)
		s.opt.Service.NoteCredential(by, "rotate_admin", "", err)
	} else {
		grace, graceErr := parseGrace(body.Grace)
		if graceErr != nil {
			return nil, graceErr
		}
		r, err = s.opt.Service.RotateAll(ctx, by, grace, s.opt.Mint.NewSecret)
		s.opt.Service.NoteCredential(by, "rotate_secret", "grace "+grace.String(), err)
	}
	if err != nil {
		return nil, err
	}
	out := api.RotatedSecret{Secret: r.Secret(), Generation: r.Generation, AdminToken: s.opt.Mint.AdminToken()}
	if clock.Now().Before(r.PreviousUntil) {
		out.PreviousUntil = api.At(r.PreviousUntil)
	}
	return newSecret(out), nil
}

func (s *Server) rotateDevice(ctx context.Context, in *rotateInput) (*tagged[api.Device], error) {
	id := deviceOf(ctx)
	grace, err := graceOf(in.Body)
	if err != nil {
		return nil, err
	}
	err = s.opt.Service.Rotate(ctx, caller(ctx), id, grace)
	s.opt.Service.NoteChange(caller(ctx), "rotate", id, "grace "+grace.String(), err)
	if err != nil {
		return nil, err
	}
	return s.show(ctx, id)
}

func (s *Server) rotateDevices(ctx context.Context, in *rotateAllInput) (*answer[api.Credentials], error) {
	grace, err := graceOf(in.Body)
	if err != nil {
		return nil, err
	}
	r, err := s.opt.Service.RotateAll(ctx, caller(ctx), grace, nil)
	s.opt.Service.NoteCredential(caller(ctx), "rotate_all", "grace "+grace.String(), err)
	return answerOf(api.Credentials{Generation: r.Generation, PreviousUntil: api.At(r.PreviousUntil)}, err)
}
