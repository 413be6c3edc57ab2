package restapi

import (
	"context"
	"net/http"
	"strconv"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// chip is one line of the list of chips, as it is imported.
type chip struct {
	Serial string `json:"serial" doc:"As burnt into the chip: 1 to 64 of [A-Za-z0-9._-]."`
	Key    string `json:"key" doc:"eFuse block KEY0, 64 hex digits. It is stored encrypted and never shown."`
	Device string `json:"device,omitempty" doc:"The device that it proves; left out: the first one that it does."`
}

type importInput struct {
	Body struct {
		Items []chip `json:"items" nullable:"false" doc:"At most 1000, and 64 KiB. All are imported or none."`
	}
}

type imported struct {
	Imported int `json:"imported"`
}

// listedChip is one line as it is shown.
type listedChip struct {
	Serial     string `json:"serial"`
	Device     string `json:"device" doc:"The device that it proves; empty until the first proof."`
	ImportedAt stamp  `json:"imported_at"`
	BoundAt    stamp  `json:"bound_at" doc:"null while it proves none."`
}

type listChipsInput struct{ Page }

type chipInput struct {
	Serial string `path:"serial" doc:"Serial number."`
}

func (s *Server) attestationRoutes() {
	huma.Register(s.api, s.operation(http.MethodPost, "/v1/attestation/keys", about{id: "importAttestationKeys", scope: access.ScopeAdmin, tag: tagDevices, summary: "Import keys of chips",
		text: "Devices whose hardware signs their challenge with one of these keys are admitted without a spoken code. A serial number that is listed gets the new key; " +
			"it stays bound to its device unless another is given.",
		answer: "How many were imported.", codes: []devices.Code{devices.CodeTooLarge, devices.CodeUnavailable}}), s.importChips)
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/attestation/keys", about{id: "listAttestationKeys", scope: access.ScopeAdmin, tag: tagDevices, summary: "List chips",
		text:   "Serial numbers and the devices that they prove; keys are never shown.",
		answer: "A page, in order of serial number.", codes: []devices.Code{devices.CodeUnavailable}}), s.listChips)
	huma.Register(s.api, s.operation(http.MethodDelete, "/v1/attestation/keys/{serial}", about{id: "removeAttestationKey", scope: access.ScopeAdmin, tag: tagDevices, summary: "Remove the key of a chip",
		text:   "It proves nothing any more. A device that it proved stays a member; revoke that if you mean it.",
		status: http.StatusNoContent, answer: "Removed.", codes: []devices.Code{devices.CodeNotFound, devices.CodeUnavailable}}), s.removeChip)
}

func (s *Server) importChips(ctx context.Context, in *importInput) (*answer[imported], error) {
	chips := make([]devices.Chip, len(in.Body.Items))
	for i, c := range in.Body.Items {
		chips[i] = devices.Chip(c)
	}
	err := s.opt.Attest.Import(ctx, chips)
	s.opt.Service.NoteCredential(caller(ctx), "import_chips", strconv.Itoa(len(chips))+" keys of chips", err)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return &answer[imported]{imported{len(chips)}}, nil
}

func (s *Server) listChips(ctx context.Context, in *listChipsInput) (*answer[list[listedChip]], error) {
	after, err := parseCursor(in.Cursor)
	if err != nil {
		return nil, err
	}
	keys, more, err := s.opt.Attest.List(ctx, after, in.Limit)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	body := list[listedChip]{Items: make([]listedChip, len(keys))}
	for i, k := range keys {
		body.Items[i] = listedChip{Serial: k.Serial, Device: string(k.Device), ImportedAt: stamp(k.ImportedAt), BoundAt: stamp(k.BoundAt)}
	}
	if more {
		body.NextCursor = newCursor(keys[len(keys)-1].Serial)
	}
	return &answer[list[listedChip]]{body}, nil
}

func (s *Server) removeChip(ctx context.Context, in *chipInput) (*struct{}, error) {
	err := s.opt.Attest.Remove(ctx, in.Serial)
	s.opt.Service.NoteCredential(caller(ctx), "remove_chip", in.Serial, err)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return nil, nil
}
