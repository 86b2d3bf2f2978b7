@echo off
rem Installs the course from this stick, without a network: install.bat [FOLDER]
for %%v in (@VERSIONS@) do (
    py -%%v -c "" >nul 2>nul && (
        py -%%v "%~dp0install.py" %*
        exit /b
    )
)
echo install: no Python @VERSIONS@ was found here (py --list shows what there is), and this stick was made for it
exit /b 1
