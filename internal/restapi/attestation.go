package restapi

import (
	"context"
	"net/http"
	"strconv"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
)

type importInput struct{ Body api.NewChips }

type listChipsInput struct{ Page }

type chipInput struct {
	Serial string `path:"serial" doc:"This is the serial number of the chip."`
}

func (s *Server) attestationRoutes() {
	register(s, s.operation(http.MethodPost, "/v1/attestation/keys", about{id: "importAttestationKeys", scope: access.ScopeAdmin, tag: tagDevices, summary: "Import keys of chips",
		text: "Devices whose hardware signs their challenge with one of these keys are admitted without a spoken code. A serial number that is listed gets the new key; " +
			"it stays bound to its device unless another is given.",
		answer: "How many were imported.", codes: []devices.Code{devices.CodeTooLarge, devices.CodeUnavailable}}), s.importChips)
	register(s, s.operation(http.MethodGet, "/v1/attestation/keys", about{id: "listAttestationKeys", scope: access.ScopeAdmin, tag: tagDevices, summary: "List chips",
		text:   "Serial numbers and the devices that they prove; keys are never shown.",
		answer: "A page, in order of serial number.", codes: []devices.Code{devices.CodeUnavailable}}), s.listChips)
	register(s, s.operation(http.MethodDelete, "/v1/attestation/keys/{serial}", about{id: "removeAttestationKey", scope: access.ScopeAdmin, tag: tagDevices, summary: "Remove the key of a chip",
		text:   "It proves nothing any more. A device that it proved stays a member; revoke that if you mean it.",
		status: http.StatusNoContent, answer: "Removed.", codes: []devices.Code{devices.CodeNotFound, devices.CodeUnavailable}}), s.removeChip)
}

func (s *Server) importChips(ctx context.Context, in *importInput) (*answer[api.Imported], error) {
	chips := make([]devices.Chip, len(in.Body.Items))
	for i, c := range in.Body.Items {
		chips[i] = devices.Chip(c)
	}
	err := s.opt.Attest.Import(ctx, chips)
	s.opt.Service.NoteCredential(caller(ctx), "import_chips", strconv.Itoa(len(chips))+" keys of chips", err)
	return answerOf(api.Imported{Imported: len(chips)}, err)
}

func (s *Server) listChips(ctx context.Context, in *listChipsInput) (*answer[api.List[api.Chip]], error) {
	p, err := s.page(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	list, err := fillPage(p, pieceLimit, func(after string, n int) (items []api.Chip, next string, err error) {
		keys, more, err := s.opt.Attest.List(ctx, after, n)
		for _, k := range keys {
			items = append(items, api.Chip{Serial: k.Serial, Device: string(k.Device), ImportedAt: api.At(k.ImportedAt), BoundAt: api.At(k.BoundAt)})
		}
		if more {
			next = keys[len(keys)-1].Serial
		}
		return items, next, err
	})
	return answerOf(list, err)
}

func (s *Server) removeChip(ctx context.Context, in *chipInput) (*struct{}, error) {
	err := s.opt.Attest.Remove(ctx, in.Serial)
	s.opt.Service.NoteCredential(caller(ctx), "remove_chip", in.Serial, err)
	return nil, err
}
