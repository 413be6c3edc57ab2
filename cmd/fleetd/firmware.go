package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/cleantext"
	"fleetd/internal/config"
	"fleetd/internal/espimage"
	"fleetd/internal/firmware"
)

type firmwareCmd struct {
	List     firmwareListCmd     `cmd:"" default:"withargs" help:"List the stored images, newest first (the default)."`
	Inspect  inspectCmd          `cmd:"" help:"Show what firmware files are, for which devices, and what is wrong with them. Exit status 0: all are fit, 2: one is not."`
	Add      firmwareAddCmd      `cmd:"" help:"Add the images of firmware files to the store of the fleet. Exit status 2: a file is not fit."`
	Show     firmwareShowCmd     `cmd:"" help:"Show a stored image."`
	Remove   firmwareRemoveCmd   `cmd:"" help:"Delete a stored image."`
	Check    firmwareCheckCmd    `cmd:"" help:"Show which devices could get an image, or the images of a release, and why others could not. Nothing is given to them."`
	Explain  firmwareExplainCmd  `cmd:"" help:"Show what a device runs and ran, and whether it could get an image."`
	Roll     firmwareRollCmd     `cmd:"" help:"Give devices an image, or the images of a release: in stages, proving each device, and stopping by itself."`
	Rollback firmwareRollbackCmd `cmd:"" help:"Give devices back the images that they had before a rollout."`
	Unbar    firmwareUnbarCmd    `cmd:"" help:"Let a device get images again that was barred after two failed flashes."`
}

type inspectCmd struct {
	Files []string `arg:"" name:"file" help:"Application image, merged binary, or zip of a release."`
	Limit string   `name:"firmware-limit" default:"32MiB" help:"Size of one file, unpacked: what your nodes take." placeholder:"SIZE"`
	JSON  bool     `name:"json" help:"Print JSON, one file per line."`
}

// Run reads the files. It needs no node.
func (cmd *inspectCmd) Run(_ context.Context, a *app) error {
	most, err := config.ParseSize(cmd.Limit, 1<<20)
	if err != nil {
		return failed("--firmware-limit %w, not %q", err, cmd.Limit)
	}
	unfit := 0
	for i, name := range cmd.Files {
		found, err := inspectFile(name, most)
		if err != nil {
			return failed("%w", err)
		}
		if !found.IsFit() {
			unfit++
		}
		file := firmware.FileView(name, found)
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
	return refusedFiles(unfit)
}

// refusedFiles is the end of a command that has named what is wrong with so many files.
func refusedFiles(unfit int) error {
	if unfit == 0 {
		return nil
	}
	return exitError{errors.New(count(unfit, "file") + " must not be given to devices; the faults above say what to do"), exitRefused}
}

func inspectFile(name string, most int64) (*espimage.File, error) {
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
	return espimage.Inspect(f, info.Size(), most, nil)
}

// printFirmware prints a file for people.
func (a *app) printFirmware(file *api.FirmwareFile, fit bool) error {
	verdict := "fit"
	if !fit {
		verdict = "not fit"
	}
	fmt.Fprintf(a.stdout, "%s: %s, %s\n", cleantext.Line(file.File), count(len(file.Images), "image"), verdict)
	for i := range file.Images {
		if err := aligned(a.stdout, "  ", imageRows(&file.Images[i]), 0); err != nil {
			return err
		}
	}
	rows := findingRows(file.Findings)
	for _, what := range file.Dropped {
		rows = append(rows, []string{"Left out", what})
	}
	return aligned(a.stdout, "  ", rows, 0)
}

// imageRows are the lines of one image.
func imageRows(x *api.FirmwareImage) [][]string {
	kind := ""
	if x.Kind == "merged" {
		kind = " (cut out of the content of a flash)"
	}
	rows := [][]string{{"Firmware", x.Project + " " + cmp.Or(x.Version, "without a version")}, {"Board", cmp.Or(strings.Join(x.Boards, ", "), "-")},
		{"Chip", x.Chip + ", revision " + x.ChipRevision}, {"Flash", sizeText(x.FlashSize)}, {"Image", x.ID[:firmware.Digits] + kind + ", " + sizeText(x.Size)}, {"ELF", x.ELF},
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
	return append(rows, findingRows(x.Findings)...)
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
