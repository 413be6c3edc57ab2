package restapi

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/firmware"
	"fleetd/internal/selector"
)

// Firmware keeps and checks firmware images. Errors are *devices.Error or those of fleet.Records.
type Firmware interface {
	Add(ctx context.Context, by access.Principal, u firmware.Upload) (added api.AddedFirmware, fresh bool, err error)
	List(ctx context.Context, by access.Principal, f firmware.Filter) ([]api.FirmwareImage, error)
	Get(ctx context.Context, by access.Principal, id string) (api.FirmwareImage, error)
	Open(ctx context.Context, id string) (api.FirmwareImage, *os.File, error)
	Edit(ctx context.Context, by access.Principal, id string, e api.FirmwareEdit) (api.FirmwareImage, error)
	Delete(ctx context.Context, by access.Principal, id string, force bool) error
	Count(ctx context.Context, by access.Principal, t firmware.Target, sel selector.Selector) (*api.FirmwareCounts, error)
	Check(ctx context.Context, by access.Principal, t firmware.Target, sel selector.Selector, after string, limit int) (items []api.FirmwareVerdict, next string, err error)
	OfDevice(ctx context.Context, id devices.ID, image string) (api.DeviceFirmware, error)
}

const (
	pathFirmware = "/v1/firmware"
	pathImage    = "/v1/firmware/{id}"
	mediaBinary  = "application/octet-stream"
)

// ImagePath names an image.
type ImagePath struct {
	ID string `path:"id" doc:"SHA-256 of the image, or its first 12 digits."`
}

type addFirmwareInput struct {
	Note      string `query:"note" maxLength:"1000"`
	SHA256    string `query:"sha256" doc:"SHA-256 of the body. Another one is a fault."`
	Signature string `query:"signature" doc:"A minisign signature of the body: the second line of FILE.minisig. With --firmware-keys it is needed."`
	DryRun    bool   `query:"dry_run" doc:"With true, the file is read and nothing is kept."`
}

type listFirmwareInput struct {
	Page
	Version string `query:"version"`
	Board   string `query:"board" doc:"The list has only images for this board."`
	Kind    string `query:"kind" enum:"application,merged"`
}

type editImageInput struct {
	ImagePath
	Body api.FirmwareEdit
}

type deleteImageInput struct {
	ImagePath
	Force bool `query:"force" doc:"With true, it is deleted although devices run it or ran it last."`
}

type checkFirmwareInput struct {
	Page
	Selection
	Image   string `query:"image" doc:"SHA-256 of an image, or its first 12 digits."`
	Release string `query:"release" example:"xiaozhi@2.4.2" doc:"All images of a project and a version; the version alone if one project has it. Each device is checked with the image for its board."`
}

type deviceFirmwareInput struct {
	DevicePath
	Image string `query:"image" doc:"SHA-256 of an image, or its first 12 digits: could the device get it?"`
}

func (s *Server) firmwareRoutes() {
	away := []devices.Code{devices.CodeUnavailable}
	known := append(away, devices.CodeNotFound, devices.CodeConflict)
	add := withAnswer(s.operation(http.MethodPost, pathFirmware, about{id: "addFirmware", scope: access.ScopeFirmware, tag: tagFirmware, summary: "Add firmware images",
		text: "An application image, a merged binary or the zip of a release; the images in it are cut out and the rest is left out. The body may have 32 MiB (--firmware-limit). " +
			"With any fault nothing is kept, and the answer has every one. A key that is limited to devices or tools is refused.",
		status: http.StatusCreated, answer: "The images of the file.", codes: append(away, devices.CodeTooLarge, devices.CodeImageInvalid, devices.CodeLimitReached)}), valueJSON[0], schemaOf[api.AddedFirmware](s))
	add.Responses["200"] = &huma.Response{Description: "Nothing in it is new, or it was a dry run.", Content: add.Responses["201"].Content}
	add.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{mediaBinary: {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}}}
	plain(s, add, s.addFirmware)
	register(s, s.operation(http.MethodGet, pathFirmware, about{id: "listFirmware", scope: access.ScopeFirmwareRead, tag: tagFirmware, summary: "List firmware images",
		answer: "A page, newest first.", codes: away}), s.listFirmware)
	register(s, s.operation(http.MethodGet, "/v1/firmware/check", about{id: "checkFirmware", scope: access.ScopeFirmwareRead, tag: tagFirmware, summary: "Check who could get an image",
		text: "By what the devices said at their last OTA checks. As with lists, a page may have fewer devices than limit.", answer: "A page of devices in order of id; the first one has counts of all.", codes: known}), s.checkFirmware)
	register(s, s.operation(http.MethodGet, pathImage, about{id: "getFirmware", scope: access.ScopeFirmwareRead, tag: tagFirmware, summary: "Show a firmware image",
		answer: "The image.", codes: known}), s.getFirmware)
	register(s, s.operation(http.MethodPatch, pathImage, about{id: "editFirmware", scope: access.ScopeFirmware, tag: tagFirmware, summary: "Change the note or the boards of an image",
		text: "A key that is limited to devices or tools is refused.", answer: "The image.", codes: known}), s.editFirmware)
	register(s, s.operation(http.MethodDelete, pathImage, about{id: "deleteFirmware", scope: access.ScopeFirmware, tag: tagFirmware, summary: "Delete a firmware image",
		text: "While devices run it, or ran it last, that is refused without force. A key that is limited to devices or tools is refused.", status: http.StatusNoContent, answer: "Deleted.", codes: known}), s.deleteFirmware)
	s.rolloutRoutes(away)
	file := withAnswer(s.operation(http.MethodGet, pathImage+"/file", about{id: "getFirmwareFile", scope: access.ScopeFirmwareRead, tag: tagFirmware, summary: "Download a firmware image",
		text: "HEAD, Range and If-None-Match are answered; the ETag is the SHA-256.", answer: "The bytes of the image.", codes: known}), mediaBinary, &huma.Schema{Type: huma.TypeString, Format: "binary"})
	file.Responses["206"] = &huma.Response{Description: "A range of them.", Content: file.Responses["200"].Content}
	file.Responses["304"] = &huma.Response{Description: "If-None-Match has the SHA-256."}
	file.Responses["416"] = &huma.Response{Description: "The image has no such range.", Content: map[string]*huma.MediaType{"text/plain": {Schema: &huma.Schema{Type: huma.TypeString}}}}
	plain(s, file, s.firmwareFile)
	register(s, s.operation(http.MethodGet, "/v1/devices/{device}/firmware", about{id: "getDeviceFirmware", scope: access.ScopeFirmwareRead, hides: true, tag: tagFirmware, summary: "Show what a device runs",
		text: "And what it ran, and whether it could get an image.", answer: "The firmware of the device.", codes: append(known, devices.CodeDeviceUnknown)}), s.deviceFirmware)
}

func (s *Server) addFirmware(w http.ResponseWriter, r *http.Request, in *addFirmwareInput) {
	by := s.by(r, access.ViaREST)
	err := s.draining()
	if err == nil {
		if err = firmware.PermitChange(by); err != nil {
			s.opt.Service.NoteChange(by, "add_firmware", "", in.SHA256[:min(len(in.SHA256), sha256.Size*2)], err)
		}
	}
	var added api.AddedFirmware
	var fresh bool
	if err == nil {
		added, fresh, err = s.receiveFirmware(w, r, by, in)
	}
	if err != nil {
		s.fail(w, r, err)
		return
	}
	w.Header()["Content-Type"] = valueJSON
	if fresh && !in.DryRun {
		w.WriteHeader(http.StatusCreated)
	}
	_ = marshal(w, added) // numbers and strings encode
}

// receiveFirmware adds the images of the body. A file that a killed node leaves behind is in the system's directory for such files.
func (s *Server) receiveFirmware(w http.ResponseWriter, r *http.Request, by access.Principal, in *addFirmwareInput) (added api.AddedFirmware, fresh bool, err error) {
	tooLarge := newProblem(&devices.Error{Code: devices.CodeTooLarge, Detail: fmt.Sprintf("a firmware file may have %d bytes (--firmware-limit)", s.opt.MaxFirmware)})
	file, err := s.spool(w, r, by, s.opt.MaxFirmware, tooLarge, func(*bufio.Reader) error { return nil })
	if err != nil {
		return added, false, err
	}
	defer func() { err = errors.Join(err, file.discard()) }()
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return added, false, s.noDisk(err)
	}
	return s.opt.Firmware.Add(r.Context(), by, firmware.Upload{File: file.File, Size: size, Note: in.Note, SHA256: in.SHA256, Signature: in.Signature, DryRun: in.DryRun})
}

func (s *Server) listFirmware(ctx context.Context, in *listFirmwareInput) (*answer[api.List[api.FirmwareImage]], error) {
	p, err := s.page(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	images, err := s.opt.Firmware.List(ctx, caller(ctx), firmware.Filter{Version: in.Version, Board: in.Board, Kind: in.Kind})
	if err != nil {
		return nil, err
	}
	list, err := fillPage(p, pieceLimit, inMemory(images, newestFirst))
	return answerOf(list, err)
}

// newestFirst is the place of an image in the list.
func newestFirst(x *api.FirmwareImage) string {
	return fmt.Sprintf("%019d %s", math.MaxInt64-x.AddedAt.UnixMicro(), x.ID)
}

func (s *Server) getFirmware(ctx context.Context, in *ImagePath) (*answer[api.FirmwareImage], error) {
	image, err := s.opt.Firmware.Get(ctx, caller(ctx), in.ID)
	return answerOf(image, err)
}

func (s *Server) editFirmware(ctx context.Context, in *editImageInput) (*answer[api.FirmwareImage], error) {
	image, err := s.opt.Firmware.Edit(ctx, caller(ctx), in.ID, in.Body)
	return answerOf(image, err)
}

func (s *Server) deleteFirmware(ctx context.Context, in *deleteImageInput) (*struct{}, error) {
	return nil, s.opt.Firmware.Delete(ctx, caller(ctx), in.ID, in.Force)
}

func (s *Server) firmwareFile(w http.ResponseWriter, r *http.Request, in *ImagePath) {
	image, file, err := s.opt.Firmware.Open(r.Context(), in.ID)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer file.Close()
	setFile(w.Header(), mediaBinary, image.ID[:firmware.Digits]+".bin", "private, no-cache")
	w.Header().Set("ETag", `"`+image.ID+`"`)
	out := &slowWriter{ResponseWriter: w, control: http.NewResponseController(w), begin: func() {}}
	http.ServeContent(out, r, "", time.Time{}, file)
	out.end()
}

func (s *Server) checkFirmware(ctx context.Context, in *checkFirmwareInput) (*answer[api.FirmwareCheck], error) {
	p, err := s.page(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	sel, err := in.selector()
	if err != nil {
		return nil, err
	}
	by, target := caller(ctx), firmware.Target{Image: in.Image, Release: in.Release}
	var out api.FirmwareCheck
	list, err := fillPage(p, pieceLimit, func(after string, n int) ([]api.FirmwareVerdict, string, error) {
		return s.opt.Firmware.Check(ctx, by, target, sel.At(p.begun), after, n)
	})
	if err == nil && in.Cursor == "" {
		out.Counts, err = s.opt.Firmware.Count(ctx, by, target, sel)
	}
	out.Items, out.NextCursor = list.Items, list.NextCursor
	return answerOf(out, err)
}

func (s *Server) deviceFirmware(ctx context.Context, in *deviceFirmwareInput) (*answer[api.DeviceFirmware], error) {
	id := deviceOf(ctx)
	out, err := s.opt.Firmware.OfDevice(ctx, id, in.Image)
	if err == nil {
		out.Last, err = s.opt.Jobs.FirmwareTask(ctx, caller(ctx), id)
	}
	return answerOf(out, err)
}
