package restapi

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/timespan"
)

// deviceCredentials is how far a device's credentials are.
type deviceCredentials struct {
	Generation    int64 `json:"generation" doc:"Of the credentials that the device gets at its next OTA check."`
	PreviousUntil stamp `json:"previous_until" doc:"Until then older ones are valid, too, unless the device comes with the new ones first; null: they are not."`
}

// graceBody says how long rotated credentials stay valid.
type graceBody struct {
	Grace string `json:"grace,omitempty" example:"30d" doc:"A duration such as 90m, 12h or 30d, from 1m to 365d; left out: 30d."`
}

type rotateInput struct {
	DevicePath
	Body *graceBody
}

type rotateAllInput struct{ Body *graceBody }

func (b *graceBody) duration() (time.Duration, error) {
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
	huma.Register(s.api, s.operation(http.MethodPost, "/v1/devices/{device}/rotate", about{id: "rotateDevice", scope: access.ScopeWrite, tag: tagDevices, summary: "Rotate a device's credentials",
		text: "It gets new ones at its next OTA check, which it makes when it boots. The old ones stay valid until it has connected with the new ones, or the grace is over. " +
			"What must die at once is revoked.",
		answer: "The device.", codes: []devices.Code{devices.CodeDeviceUnknown, devices.CodeUnavailable}}), s.rotateDevice)
	huma.Register(s.api, s.operation(http.MethodPost, "/v1/devices/rotate", about{id: "rotateDevices", scope: access.ScopeAdmin, tag: tagDevices, summary: "Rotate the credentials of all devices",
		text:   "As for one device, for every device there is and will be. Refused while the grace of the last time runs.",
		answer: "The generation of all credentials from now on.", codes: []devices.Code{devices.CodeUnavailable}}), s.rotateDevices)
}

// secretBody says how the fleet's secret is rotated.
type secretBody struct {
	AdminOnly bool   `json:"admin_only,omitempty" doc:"Only the admin token: devices, and what is sealed, stay as they are."`
	Grace     string `json:"grace,omitempty" example:"30d" doc:"How long devices that did not boot since keep their credentials: a duration from 1m to 365d; left out: 30d."`
}

type rotateSecretInput struct{ Body *secretBody }

// rotatedSecret is what came of it.
type rotatedSecret struct {
	Secret        int64  `json:"secret" doc:"Number of the secret; 0 is the one of the settings."`
	Generation    int64  `json:"generation" doc:"Of all credentials of devices from now on."`
	PreviousUntil stamp  `json:"previous_until,omitzero" doc:"When those before end."`
	AdminToken    string `json:"admin_token" doc:"The new one. The one of this request is worth nothing any more."`
}

func (s *Server) secretRoutes() {
	huma.Register(s.api, s.operation(http.MethodPost, "/v1/secret/rotate", about{id: "rotateSecret", scope: access.ScopeAdmin, tag: tagNodes, summary: "Rotate the fleet's secret",
		text: "All that derives from the secret is made from a new one: devices get new credentials as when all are rotated, nodes sign with it, and chip keys are sealed anew. " +
			"The admin token ends at once on every node that is reached. Refused while the grace of the last time runs, but for `admin_only`.",
		answer: "The number of the secret, and the new admin token.", codes: []devices.Code{devices.CodeUnavailable}}), s.rotateSecret)
}

func (s *Server) rotateSecret(ctx context.Context, in *rotateSecretInput) (*answer[rotatedSecret], error) {
	by := caller(ctx)
	var body secretBody
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
		r, err = s.opt.Service.RotateSecret(ctx, by, grace, s.opt.Mint.NewSecret)
		s.opt.Service.NoteCredential(by, "rotate_secret", "grace "+grace.String(), err)
	}
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	out := rotatedSecret{Secret: r.Secret(), Generation: r.Generation, AdminToken: s.opt.Mint.AdminToken()}
	if time.Now().Before(r.PreviousUntil) {
		out.PreviousUntil = stamp(r.PreviousUntil)
	}
	return &answer[rotatedSecret]{out}, nil
}

func (s *Server) rotateDevice(ctx context.Context, in *rotateInput) (*tagged[device], error) {
	id, err := parseDevice(in.Device)
	if err != nil {
		return nil, err
	}
	grace, err := in.Body.duration()
	if err != nil {
		return nil, err
	}
	err = s.opt.Service.Rotate(ctx, caller(ctx), id, grace)
	s.opt.Service.NoteChange(caller(ctx), "rotate", id, "grace "+grace.String(), err)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return s.show(ctx, id)
}

func (s *Server) rotateDevices(ctx context.Context, in *rotateAllInput) (*answer[deviceCredentials], error) {
	grace, err := in.Body.duration()
	if err != nil {
		return nil, err
	}
	r, err := s.opt.Service.RotateAll(ctx, caller(ctx), grace)
	s.opt.Service.NoteCredential(caller(ctx), "rotate_all", "grace "+grace.String(), err)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return &answer[deviceCredentials]{deviceCredentials{r.Generation, stamp(r.PreviousUntil)}}, nil
}
