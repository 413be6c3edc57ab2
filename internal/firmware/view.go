package firmware

import (
	"encoding/hex"

	"fleetd/internal/api"
	"fleetd/internal/espimage"
	"fleetd/internal/preflight"
)

// FileView returns what was found in a file as the API has it.
func FileView(name string, found *espimage.File) api.FirmwareFile {
	file := api.FirmwareFile{File: name, Images: []api.FirmwareImage{}, Dropped: append([]string{}, found.Dropped...), Findings: []api.ImageFinding{}}
	for _, fault := range found.Faults {
		file.Findings = append(file.Findings, finding("error", fault))
	}
	for _, image := range found.Images {
		file.Images = append(file.Images, imageView(image))
	}
	return file
}

func finding(severity string, f espimage.Fault) api.ImageFinding {
	text := f.Text
	if f.File != "" {
		text = f.File + ": " + text
	}
	return api.ImageFinding{Code: f.Code, Severity: severity, Text: text}
}

func imageView(x *espimage.Image) api.FirmwareImage {
	out := api.FirmwareImage{ID: hex.EncodeToString(x.SHA256[:]), File: x.File, Kind: "application", Project: x.Project, Version: x.Version, Boards: append([]string{}, x.Boards...),
		Chip: x.Chip.String(), ChipRevision: x.Revisions(), FlashSize: x.FlashSize, ELF: hex.EncodeToString(x.ELF[:]), Size: x.Size,
		SecureVersion: x.SecureVersion, IDFVersion: x.IDF, BuiltAt: api.At(x.Built), Signature: string(x.Signature), Findings: []api.ImageFinding{}, Layout: layoutView(x.Layout)}
	if len(x.URLs) > 0 {
		out.OTAURL = x.URLs[0]
	}
	if x.Merged {
		out.Kind = "merged"
	}
	for _, fault := range x.Faults {
		out.Findings = append(out.Findings, finding("error", fault))
	}
	for _, warning := range x.Warnings() {
		out.Findings = append(out.Findings, finding("warning", warning))
	}
	return out
}

func layoutView(layout []espimage.Partition) (out []api.Partition) {
	for _, p := range layout {
		out = append(out, api.Partition{Label: p.Label, Type: int(p.Type), Subtype: int(p.Subtype), Offset: p.Offset, Size: p.Size})
	}
	return out
}

// view returns the image as the API has it, without the number of its devices.
func (i *Image) view() api.FirmwareImage {
	out := imageView(&i.Image)
	out.StoredImage = api.StoredImage{Note: i.Note, AddedBy: i.AddedBy, AddedAt: api.At(i.AddedAt)}
	if i.ByHand != nil {
		out.Boards = i.ByHand
	}
	return out
}

func (i *Image) judged() *preflight.Image {
	return &preflight.Image{Image: &i.Image, ELF: i.ELFText(), ByHand: i.ByHand}
}
