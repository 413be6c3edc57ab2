package main

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/cleantext"
	"fleetd/internal/espimage"
)

type firmwareCmd struct {
	Inspect inspectCmd `cmd:"" help:"Show what firmware files are, for which devices, and what is wrong with them. Exit status 0: all are fit, 2: one is not."`
}

// maxFirmware is how many bytes a firmware file may have, unpacked: the largest boards have a flash of 32 MiB.
const maxFirmware = 32 << 20

type inspectCmd struct {
	Files []string `arg:"" name:"file" help:"Application image, merged binary, or zip of a release."`
	JSON  bool     `name:"json" help:"Print JSON, one file per line."`
}

// Run reads the files. It needs no node.
func (cmd *inspectCmd) Run(_ context.Context, a *app) error {
	unfit := 0
	for i, name := range cmd.Files {
		found, err := inspectFile(name)
		if err != nil {
			return failed("%w", err)
		}
		if !found.IsFit() {
			unfit++
		}
		file := firmwareFile(name, found)
		switch {
		case cmd.JSON:
			var line []byte
			if line, err = json.Marshal(file); err == nil {
				err = printJSONLine(a.stdout, line)
			}
		default:
			if i > 0 {
				fmt.Fprintln(a.stdout)
			}
			err = a.printFirmware(&file, found.IsFit())
		}
		if err != nil {
			return err
		}
	}
	if unfit > 0 {
		return exitError{errors.New(count(unfit, "file") + " must not be given to devices; the faults above say what to do"), exitRefused}
	}
	return nil
}

func inspectFile(name string) (*espimage.File, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no file; give an application image, a merged binary or the zip of a release", name)
	}
	if err != nil {
		return nil, err
	}
	return espimage.Inspect(f, info.Size(), maxFirmware, nil)
}

// firmwareFile returns what was found as the API has it.
func firmwareFile(name string, found *espimage.File) api.FirmwareFile {
	file := api.FirmwareFile{File: name, Images: []api.FirmwareImage{}, Dropped: append([]string{}, found.Dropped...), Findings: []api.ImageFinding{}}
	for _, fault := range found.Faults {
		file.Findings = append(file.Findings, finding("error", fault))
	}
	for _, image := range found.Images {
		file.Images = append(file.Images, firmwareImage(image))
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

func firmwareImage(x *espimage.Image) api.FirmwareImage {
	revision := func(n int) string { return fmt.Sprintf("%d.%d", n/100, n%100) }
	out := api.FirmwareImage{ID: hex.EncodeToString(x.SHA256[:]), File: x.File, Kind: "application", Project: x.Project, Version: x.Version, Boards: append([]string{}, x.Boards...),
		Chip: x.Chip.String(), ChipRevision: "from " + revision(x.MinRevision), FlashSize: x.FlashSize, ELF: hex.EncodeToString(x.ELF[:]), Size: x.Size,
		SecureVersion: x.SecureVersion, IDFVersion: x.IDF, BuiltAt: api.At(x.Built), Signature: string(x.Signature), Findings: []api.ImageFinding{}}
	if x.MaxRevision > 0 {
		out.ChipRevision = revision(x.MinRevision) + " to " + revision(x.MaxRevision)
	}
	if len(x.URLs) > 0 {
		out.OTAURL = x.URLs[0]
	}
	if x.Merged {
		out.Kind = "merged"
	}
	for _, p := range x.Layout {
		out.Layout = append(out.Layout, api.Partition{Label: p.Label, Type: int(p.Type), Subtype: int(p.Subtype), Offset: p.Offset, Size: p.Size})
	}
	for _, fault := range x.Faults {
		out.Findings = append(out.Findings, finding("error", fault))
	}
	for _, warning := range x.Warnings() {
		out.Findings = append(out.Findings, finding("warning", warning))
	}
	return out
}

// printFirmware prints a file for people.
func (a *app) printFirmware(file *api.FirmwareFile, fit bool) error {
	verdict := "fit"
	if !fit {
		verdict = "not fit"
	}
	fmt.Fprintf(a.stdout, "%s: %s, %s\n", cleantext.Line(file.File), count(len(file.Images), "image"), verdict)
	for i := range file.Images {
		x := &file.Images[i]
		kind := ""
		if x.Kind == "merged" {
			kind = " (cut out of the content of a flash)"
		}
		rows := [][]string{{"Firmware", x.Project + " " + cmp.Or(x.Version, "without a version")}, {"Board", cmp.Or(strings.Join(x.Boards, ", "), "-")},
			{"Chip", x.Chip + ", revision " + x.ChipRevision}, {"Flash", sizeText(x.FlashSize)}, {"Image", x.ID[:12] + kind + ", " + sizeText(x.Size)}, {"ELF", x.ELF},
			{"Built", cmp.Or(utcText(x.BuiltAt), "-") + " with ESP-IDF " + cmp.Or(x.IDFVersion, "of an unknown version")}, {"OTA URL", cmp.Or(x.OTAURL, "-")}}
		if x.File != "" {
			rows = append([][]string{{"File", x.File}}, rows...)
		}
		if x.Signature != "" {
			rows = append(rows, []string{"Signed", x.Signature})
		}
		if len(x.Layout) > 0 {
			rows = append(rows, []string{"Layout", layoutText(x.Layout)})
		}
		rows = append(rows, findingRows(x.Findings)...)
		if err := aligned(a.stdout, "  ", rows, 0); err != nil {
			return err
		}
	}
	rows := findingRows(file.Findings)
	for _, what := range file.Dropped {
		rows = append(rows, []string{"Left out", what})
	}
	return aligned(a.stdout, "  ", rows, 0)
}

func findingRows(findings []api.ImageFinding) (rows [][]string) {
	for _, f := range findings {
		rows = append(rows, []string{map[string]string{"error": "Fault", "warning": "Warning"}[f.Severity], f.Text + " (" + f.Code + ")"})
	}
	return rows
}

func layoutText(layout []api.Partition) string {
	var texts []string
	for _, p := range layout {
		texts = append(texts, p.Label+" "+sizeText(p.Size))
	}
	return strings.Join(texts, ", ")
}
